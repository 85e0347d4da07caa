"""Memo of pure functions of texts, kept in a file of the state directory.

A key of a stage needs facts of some 200 source files. Parsing them takes 3 s of processor time, reading the memo 10 ms.
"""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from rlcore.errors import StorageError
from rlcore.tasks.store.storage import read_json, write_json

T = TypeVar("T")
_MOST = 10_000  # entries of a file, which begins anew beyond
_KNOWN: dict[str, Any] = {}


def remembered(function: Callable[..., T]) -> Callable[..., T]:
    """Memoize a pure function of texts with a JSON value; :func:`remembered_in` keeps its values between processes.

    A value counts for the present source of the function's module and this version of Python.
    """
    code = inspect.getsource(sys.modules[function.__module__])
    made_by = _sha256(function.__qualname__, str(sys.version_info[:2]), code)

    @lru_cache(maxsize=4096)
    def known(*texts: str) -> T:
        key = _sha256(made_by, *texts)
        if key not in _KNOWN:
            _KNOWN[key] = function(*texts)
        value: T = _KNOWN[key]
        return value

    return known


def _sha256(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()


@contextmanager
def remembered_in(path: Path) -> Iterator[None]:
    """Read the values of ``path`` now, and add the new ones at the end. Without its folder nothing is written."""
    with suppress(StorageError):
        found = read_json(path)
        _KNOWN.update(found if isinstance(found, dict) and len(found) < _MOST else {})
    before = len(_KNOWN)
    try:
        yield
    finally:
        if len(_KNOWN) > before and path.parent.is_dir():
            with suppress(StorageError):
                write_json(_KNOWN, path)

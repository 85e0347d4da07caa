"""Memo of pure functions of texts, kept in a file of the state directory.

A stage's key needs facts of some 200 source files. Parsing them takes 3 s of processor time, reading the memo 10 ms.
Other facts need libraries whose import takes longer than a whole plan.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, TypeVar

from rlcore.errors import StorageError
from rlcore.tasks.store.settings import find_home
from rlcore.tasks.store.storage import read_json, write_json

T = TypeVar("T")
_MOST = 10_000  # entries of a file, which begins anew beyond
_USED: dict[str, Any] = {}  # by this process


def remembered(function: Callable[..., T]) -> Callable[..., T]:
    """Memoize a pure function of texts with a JSON value; :func:`remembering` keeps its values between processes.

    A value counts for the present source of the function's module and this version of Python. Everything else that
    decides on it must be among the texts, such as a digest of the code that the function imports.
    """
    code = inspect.getsource(sys.modules[function.__module__])
    made_by = _sha256(function.__qualname__, str(sys.version_info[:2]), code)

    @lru_cache(maxsize=4096)
    def known(*texts: str) -> T:
        key = _sha256(made_by, *texts)
        if key not in _USED:
            kept = _kept(find_home().source_facts)
            _USED[key] = kept[key] if key in kept else function(*texts)
        value: T = _USED[key]
        return value

    return known


def _sha256(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()


@cache
def _kept(path: Path) -> dict[str, Any]:
    """Return the values of earlier processes; a damaged file has none, and another user's is not believed."""
    with suppress(StorageError, OSError):
        found = read_json(path) if path.stat().st_uid in (os.geteuid(), 0) else {}
        return found if isinstance(found, dict) else {}
    return {}


@contextmanager
def remembering(path: Path) -> Iterator[None]:
    """Add the new values to ``path`` at the end, if its folder can be made."""
    try:
        yield
    finally:
        if not _USED.keys() <= _kept(path).keys():
            _kept.cache_clear()  # another process may have added its own meanwhile
            kept = _kept(path)
            with suppress(StorageError, OSError):
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                write_json(_USED if len(kept) >= _MOST else kept | _USED, path)
            _kept.cache_clear()

"""Errors of checks as lines that begin with a preset key."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection

from rlcore.errors import RlcoreError

_KEY = re.compile(r"[a-z_]+(\.\w+)*")


def collect_error(path: str, work: Callable[[], object], *, within: bool = False) -> list[str]:
    """Return the error of ``work`` as a line that begins with its key, or with ``path`` if it has none.

    ``within``: keys of its errors are within ``path``.
    """
    try:
        work()
    except RlcoreError as error:
        where, section = error.where, path.partition(".")[0]
        is_key = bool(_KEY.fullmatch(where))
        key = f"{path}.{where}" if within and is_key else where if where.startswith(f"{section}.") else path
        file = f" ({where})" if where and not is_key else ""
        return [f"{key}: {error.what}{file}" + (f"; {error.fix}" if error.fix else "")]
    return []


def follows(error: str, missing: Collection[str]) -> bool:
    """Return True if an error follows from missing keys: it is of one, or names what its table misses."""
    key, _, what = error.partition(":")
    return key in missing or ("missing" in what and any(each.startswith(f"{key}.") for each in missing))

"""Sources of rlcore, which stay as they are while tests run: each closure is walked once and not for each key."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rlcore.tasks.store import code_hash

walk = code_hash._reach
_known: dict[tuple[object, ...], dict[str, Path]] = {}


def install() -> None:
    """Keep the closures of modules of rlcore; those of users are walked each time."""
    code_hash._reach = reach


def reach(module: str, chosen: Mapping[str, frozenset[str]], root: Path | None) -> dict[str, Path]:
    """Return the closure of a module as :func:`rlcore.tasks.store.code_hash._reach` does."""
    if root is not None or not module.startswith("rlcore."):
        return walk(module, chosen, root)
    key = module, *sorted(chosen.items())
    if key not in _known:
        _known[key] = walk(module, chosen, root)
    return _known[key]

"""Files that rewards and environments of a preset read."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from rlcore.config import RewardTerm
from rlcore.errors import DataError
from rlcore.tasks.store.storage import file_sha256


def files_of(term: RewardTerm) -> tuple[str, ...]:
    """Return the files that a term reads: those of custom functions, and a judge's template."""
    template = term.options.get("template", "") if term.kind == "judge" else ""
    return (*term.files, *([str(template)] if template else []))


def by_name(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return the digests of files by name; files of one name share an entry."""
    found: dict[str, str] = {}
    for name, digest in dict.fromkeys(pairs):
        found[name] = f"{found[name]} {digest}" if name in found else digest
    return found


def file_digest(path: str) -> tuple[str, str]:
    """Return the name and the SHA-256 of a file that a reward or an environment reads.

    Raises:
        DataError: it cannot be read.
    """
    try:
        return Path(path).name, file_sha256(Path(path))
    except OSError as error:
        raise DataError(f"cannot read a file that the preset names: {error.strerror}", where=path) from error

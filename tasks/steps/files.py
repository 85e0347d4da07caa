"""Files that rewards and environments of a preset read."""

from __future__ import annotations

from pathlib import Path

from rlcore.config import RewardTerm
from rlcore.errors import DataError
from rlcore.tasks.store.artifacts import file_sha256


def files_of(term: RewardTerm) -> tuple[str, ...]:
    """Return the files that a term reads: those of custom functions, and a judge's template."""
    template = term.options.get("template", "") if term.kind == "judge" else ""
    return (*term.files, *([str(template)] if template else []))


def file_digest(path: str) -> str:
    """Return the SHA-256 of a file that a reward or an environment reads.

    Raises:
        DataError: it cannot be read.
    """
    try:
        return file_sha256(Path(path))
    except OSError as error:
        raise DataError(f"cannot read a file that the preset names: {error.strerror}", where=path) from error

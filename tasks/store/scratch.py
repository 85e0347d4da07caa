"""Temporary folders of commands, in the home: what a kill leaves of one goes with the next command.

A folder is locked while its command runs (:mod:`rlcore.models.unfinished`). What a command begins elsewhere, beside the
folder that a user has named, is announced in here before.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from rlcore.models.unfinished import abandoned, remove_abandoned, unfinished_folder

_PREFIX = ".scratch-"
_ELSEWHERE = "elsewhere"  # a file with the folder and the prefix of what is begun there


def scratch_folder(work: Path) -> AbstractContextManager[Path]:
    """A new folder in a home's ``work``, gone afterwards."""
    return unfinished_folder(work, _PREFIX)


@contextmanager
def announced(work: Path, folder: Path, prefix: str) -> Iterator[None]:
    """Have the next command remove what a kill in the block leaves in ``folder`` under names of that prefix."""
    with scratch_folder(work) as own:
        (own / _ELSEWHERE).write_text(f"{folder}\n{prefix}", encoding="utf-8")
        yield


def remove_left(work: Path) -> None:
    """Remove what commands that were killed have left."""
    for folder in abandoned(work, _PREFIX):
        note = folder / _ELSEWHERE
        if note.is_file():
            elsewhere, _, prefix = note.read_text(encoding="utf-8").rpartition("\n")
            if prefix:
                remove_abandoned(Path(elsewhere), prefix)
        shutil.rmtree(folder, ignore_errors=True)

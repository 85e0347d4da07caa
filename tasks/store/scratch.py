"""Temporary folders of commands in the state directory; the next command removes those of killed ones.

A folder is locked while its command runs (:mod:`rlcore.models.files`). Partial output next to a folder that the
user named is announced here first.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from rlcore.models.files import abandoned, remove_abandoned, unfinished_folder

_PREFIX = ".scratch-"
_ELSEWHERE = "elsewhere"  # a file with the folder and the prefix of partial output


def scratch_folder(work: Path) -> AbstractContextManager[Path]:
    """Make a new folder in a state directory's ``work``, removed afterwards."""
    return unfinished_folder(work, _PREFIX)


@contextmanager
def announced(work: Path, folder: Path, prefix: str) -> Iterator[None]:
    """Let the next command remove files of that prefix in ``folder`` if the block is killed."""
    with scratch_folder(work) as own:
        (own / _ELSEWHERE).write_text(f"{folder}\n{prefix}", encoding="utf-8")
        yield


def remove_left(work: Path) -> None:
    """Remove the remains of killed commands."""
    for folder in abandoned(work, _PREFIX):
        note = folder / _ELSEWHERE
        if note.is_file():
            elsewhere, _, prefix = note.read_text(encoding="utf-8").rpartition("\n")
            if prefix:
                remove_abandoned(Path(elsewhere), prefix)
        shutil.rmtree(folder, ignore_errors=True)

"""Temporary folders that are locked as long as somebody writes in them: one without a lock was left by a kill.

The lock is the kernel's, on the folder itself, and ends with its process however that ends. Where a disk has no such
locks, a folder counts as somebody's.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_DRAWN = "[0-9a-f]{8}"


@contextmanager
def unfinished_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """A new folder ``<prefix><8 hexadecimal digits>`` in ``parent``, gone afterwards unless it was renamed."""
    while True:
        folder = parent / f"{prefix}{uuid.uuid4().hex[:8]}"
        folder.mkdir(parents=True)
        descriptor = os.open(folder, os.O_RDONLY)
        if _lock(descriptor, where_there_are_none=True) and folder.is_dir():
            break  # else somebody took it for abandoned before it was locked
        os.close(descriptor)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def abandoned(parent: Path, prefix: str) -> Iterator[Path]:
    """The folders of a prefix, or of just that name, that nobody writes in; nobody else can take one meanwhile."""
    ours = re.compile(f"{re.escape(prefix)}({_DRAWN})?")
    for folder in [each for each in parent.iterdir() if ours.fullmatch(each.name)] if parent.is_dir() else ():
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:  # gone, a file, or not ours
            continue
        try:
            if _lock(descriptor, where_there_are_none=False):
                yield folder
        finally:
            os.close(descriptor)


def remove_abandoned(parent: Path, prefix: str) -> None:
    """Remove what kills have left of a prefix."""
    for folder in abandoned(parent, prefix):
        shutil.rmtree(folder, ignore_errors=True)


def _lock(descriptor: int, *, where_there_are_none: bool) -> bool:
    """True if the folder is ours now; ``where_there_are_none``: the answer of a disk without locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return where_there_are_none
    return True

"""Temporary folders that are locked while a process writes to them; one without a lock was left by a killed process.

The kernel releases the lock with the process. On a file system without locks, a folder counts as in use.
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
    """Yield a new folder ``<prefix><8 hexadecimal digits>`` in ``parent``; remove it unless it was renamed."""
    while True:
        folder = parent / f"{prefix}{uuid.uuid4().hex[:8]}"
        folder.mkdir(parents=True)
        descriptor = os.open(folder, os.O_RDONLY)
        if _lock(descriptor, where_there_are_none=True) and folder.is_dir():
            break  # else another process removed it before it was locked
        os.close(descriptor)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def abandoned(parent: Path, prefix: str) -> Iterator[Path]:
    """Yield, locked, the folders with a prefix, or of exactly that name, that no process writes to."""
    ours = re.compile(f"{re.escape(prefix)}({_DRAWN})?")
    for folder in [each for each in parent.iterdir() if ours.fullmatch(each.name)] if parent.is_dir() else ():
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:  # removed, a file, or no permission
            continue
        try:
            if _lock(descriptor, where_there_are_none=False):
                yield folder
        finally:
            os.close(descriptor)


def remove_abandoned(parent: Path, prefix: str) -> None:
    """Remove the folders with a prefix that killed processes left."""
    for folder in abandoned(parent, prefix):
        shutil.rmtree(folder, ignore_errors=True)


def _lock(descriptor: int, *, where_there_are_none: bool) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return where_there_are_none
    return True

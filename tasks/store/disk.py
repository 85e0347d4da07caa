"""Durable writes, and errors of a full disk from any writer: the system, SQLite, Arrow."""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlcore.errors import RlcoreError, StorageError

_TEXTS = ("No space left on device", "database or disk is full", "Disk quota exceeded")  # of errors that hold only text

_FIXES = {
    errno.ENOSPC: "free some space on that disk, or move the state folder to another one",
    errno.EDQUOT: "the quota is used up: free some space, or move the state folder to another disk",
    errno.EACCES: "give this user the right to read and write there, or name another folder",
    errno.EPERM: "give this user the right to read and write there, or name another folder",
    errno.EROFS: "the file system is read-only: name another folder",
    errno.ENOENT: "run the stage that writes it, or correct the path",
}


def to_storage_error(verb: str, path: Path, error: OSError) -> StorageError:
    """Convert a file error of the system to a StorageError with a fix."""
    reason = error.strerror or str(error)
    return StorageError(f"cannot {verb} the file: {reason}", where=str(path), fix=_FIXES.get(error.errno or 0, ""))


def existing_parent(path: Path) -> Path:
    """Return a path if it exists, else the nearest folder above it that does."""
    return next(each for each in (path, *path.resolve().parents) if each.exists())


_NETWORK = {"nfs", "nfs4", "cifs", "smb3", "smbfs", "fuse.sshfs"}


def network_file_system(path: Path) -> str:
    """Return the type of the file system of an existing path (``nfs4``), if it lies on another machine; else empty."""
    import psutil

    mounts = {Path(each.mountpoint): each.fstype for each in psutil.disk_partitions(all=True)}
    kind = next((mounts[each] for each in (path.resolve(), *path.resolve().parents) if each in mounts), "")
    return kind if kind in _NETWORK else ""


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to disk, so that a power cut cannot undo them."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def raise_on_full_disk(folder: Path) -> Iterator[None]:
    """Convert any error of the block that was caused by a full disk.

    Raises:
        StorageError: instead of an error that was caused by a full disk or quota.
    """
    try:
        yield
    except RlcoreError:
        raise
    except Exception as error:
        if not is_full_disk(error):
            raise
        raise StorageError(
            "the disk is full",
            where=str(folder),
            fix="make room there, or set RLCORE_HOME to a larger disk, then start again: finished stages are kept",
        ) from None


def is_full_disk(error: BaseException) -> bool:
    """Return True if the error, or one of its causes, was a full disk."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        no_space = isinstance(one, OSError) and one.errno in (errno.ENOSPC, errno.EDQUOT)
        full_base = isinstance(one, sqlite3.Error) and getattr(one, "sqlite_errorcode", 0) == sqlite3.SQLITE_FULL
        if no_space or full_base or any(text in str(one) for text in _TEXTS):
            return True
        waiting += [one.__cause__, one.__context__]
    return False

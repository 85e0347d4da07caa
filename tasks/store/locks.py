"""Exclusive file locks, which the kernel releases however their holder dies, and temporary folders of commands.

They use ``flock`` and not process ids, which are reused and mean nothing in other containers on the same folder.

A temporary folder is locked while its command runs (:mod:`rlcore.models.files`); the next command removes those of
killed ones. Partial output next to a folder that the user named is announced in one first.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from rlcore.models.files import abandoned, remove_abandoned, unfinished_folder
from rlcore.tasks.store.storage import to_storage_error

logger = logging.getLogger(__name__)

_held: set[int] = set()
_PREFIX = ".scratch-"
_ELSEWHERE = "elsewhere"  # a file with the folder and the prefix of partial output


def _forget_in_child() -> None:
    # A forked worker inherits the descriptor and would keep the lock alive after its parent's death.
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_forget_in_child)


@contextmanager
def file_lock(path: Path, *, wait: bool = True, spare: bool = False) -> Iterator[bool]:
    """Hold the lock file ``path``, which is removed afterwards. With ``spare`` it stays if the block fails.

    Yields True while the lock is held, or False immediately if another process holds it and ``wait`` is off.
    Raises:
        StorageError: the file cannot be made.
    """
    descriptor = _acquire(path, wait=wait)
    if descriptor is None:
        yield False
        return
    stays = spare
    try:
        yield True
        stays = False
    finally:
        # Removed while still held: a waiter notices that its file is no longer the one at this path.
        if not stays:
            path.unlink(missing_ok=True)
        _release(descriptor)


@contextmanager
def locked_file(path: Path, text: str, *, goes: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Create a file that is locked from its first visible moment, and removed afterwards if ``goes`` returns True.

    Raises:
        StorageError: the file cannot be made.
    """
    hidden = path.with_name(f".{path.name}.new")
    try:
        with hidden.open("x", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
            descriptor = os.dup(file.fileno())  # keeps the lock when the file is closed
        hidden.rename(path)
    except OSError as error:
        hidden.unlink(missing_ok=True)
        raise to_storage_error("write", path, error) from error
    _held.add(descriptor)
    try:
        yield
    finally:
        if goes():
            path.unlink(missing_ok=True)
        _release(descriptor)


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder itself, which leaves no file: a kill would leave that too."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def is_held(path: Path) -> bool:
    """Return True if a process holds the lock of a file, without changing it; False if there is no file."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except (FileNotFoundError, NotADirectoryError):
        return False
    return False


def _acquire(path: Path, *, wait: bool) -> int | None:
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise to_storage_error("make", path, error) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not wait:
                os.close(descriptor)
                return None
            logger.info("waiting for the lock %s of another process", path.name)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if _is_at(path, descriptor):
            _held.add(descriptor)
            return descriptor
        os.close(descriptor)


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        there, ours = path.stat(), os.fstat(descriptor)
    except FileNotFoundError:
        return False
    return (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino)


def _release(descriptor: int) -> None:
    if descriptor in _held:  # not in a forked child, where it is closed already
        _held.discard(descriptor)
        os.close(descriptor)


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

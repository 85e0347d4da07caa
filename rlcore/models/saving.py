"""Checkpoint folders that are whole or not there at all, and digests of their files."""

from __future__ import annotations

import hashlib
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from rlcore.errors import StorageError


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder beside ``folder`` that gets its name when the block ends without an error.

    Raises:
        StorageError: the folder exists, or the disk refuses; nothing is left behind.
    """
    if folder.exists():
        raise StorageError("the folder exists already", where=str(folder), fix="remove it, or name another one")
    temporary = folder.with_name(f".tmp-{folder.name}-{uuid.uuid4().hex[:8]}")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        for path in (*temporary.rglob("*"), temporary):
            path.chmod(0o755 if path.is_dir() else 0o644)  # safetensors writes files that only their owner can read
            _fsync(path)
        temporary.rename(folder)
        _fsync(folder.parent)
    except (OSError, SafetensorError) as error:
        raise StorageError(
            f"the checkpoint could not be written: {error}",
            where=str(folder),
            fix="free space or correct the permissions, then start again",
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def weights_digest(folder: Path) -> str:
    """SHA-256 over the bytes of the folder's safetensors files, in the order of their names."""
    return files_digest(sorted(folder.glob("*.safetensors")))


def files_digest(paths: list[Path]) -> str:
    """SHA-256 over the concatenated bytes of files; of one file it is what ``sha256sum`` prints."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as stream:
            while chunk := stream.read(1 << 20):
                digest.update(chunk)
    return digest.hexdigest()


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""Files that are what was sealed, by their length and SHA-256: those of a folder, and one beside it that only grows.

A checkpoint's manifest states each of its files. What a run gathers is written once, beside its checkpoints; each keeps
a seal of it, which has always the same size. What stands behind the sealed part is of iterations that a resumed run
does again, and is overwritten.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from rlcore.errors import CheckpointError, StorageError
from rlcore.models.saving import fsync

MANIFEST = "MANIFEST.json"
Seal = Mapping[str, Any]
_EMPTY: Seal = {"bytes": 0, "sha256": hashlib.sha256().hexdigest()}


class AppendOnlyFile:
    """The lines of a file. Those that were added are on the disk once :meth:`seal` has returned."""

    def __init__(self, path: Path) -> None:
        self._path, self._waiting = path, list[str]()
        self._num_bytes, self._digest = 0, hashlib.sha256()

    def add(self, line: str) -> None:
        """Take a line, which holds no line break."""
        self._waiting.append(line + "\n")

    def seal(self) -> Seal:
        """Write what waits, and describe the whole file.

        Raises:
            StorageError: the disk is full or refuses. The lines wait on.
        """
        data = "".join(self._waiting).encode()
        if data:
            try:
                self._write(data)
            except OSError as error:
                raise StorageError(
                    f"the file beside the checkpoints could not be written: {error}",
                    where=str(self._path),
                    fix="free space or correct the permissions, then start the same command again: it resumes",
                ) from error
            self._digest.update(data)
            self._num_bytes += len(data)
            self._waiting.clear()
        return {"bytes": self._num_bytes, "sha256": self._digest.hexdigest()}

    def restore(self, seal: Seal | None) -> Sequence[str]:
        """Go on behind the sealed part, whose lines are returned; from the beginning without a seal.

        Raises:
            CheckpointError: the file is not what was sealed.
        """
        seal = seal or _EMPTY
        data = _prefix(self._path, seal)
        digest = hashlib.sha256(data)
        if digest.hexdigest() != seal["sha256"]:
            raise CheckpointError(
                "the file beside the checkpoints is not what the newest one has sealed",
                where=str(self._path),
                fix="bring it back from a backup, or remove its folder to start anew",
            )
        self._num_bytes, self._digest = len(data), digest
        self._waiting.clear()
        return data.decode().splitlines()

    def _write(self, data: bytes) -> None:
        is_new = not self._path.exists()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("xb" if is_new else "r+b") as stream:
            stream.seek(self._num_bytes)
            stream.truncate()
            stream.write(data)
        fsync(self._path)
        if is_new:
            fsync(self._path.parent)


def has_sealed_prefix(path: Path, seal: Seal) -> bool:
    """Whether a file begins with what was sealed; it may have grown since.

    Raises:
        OSError: it cannot be read, or is not there.
    """
    return bool(hashlib.sha256(_prefix(path, seal)).hexdigest() == seal["sha256"])


def _prefix(path: Path, seal: Seal) -> bytes:
    if not seal["bytes"]:
        return b""
    with path.open("rb") as stream:
        return stream.read(seal["bytes"])


def write_manifest(folder: Path) -> None:
    """State every file of a folder in its manifest; all of it is on the disk then."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    manifest = {path.name: _describe(path) for path in files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    for path in (*files, folder / MANIFEST, folder):
        fsync(path)


def matches_manifest(folder: Path, *, at_least: Set[str]) -> bool:
    """Whether a folder has the files of its manifest as they are stated, and no others; ``at_least`` are among them.

    Raises:
        OSError, ValueError, TypeError, AttributeError: there is no manifest, or it is none.
    """
    manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    there = {path.name for path in folder.iterdir()} - {MANIFEST}
    is_whole = at_least <= manifest.keys() == there
    return is_whole and all(_describe(folder / name) == entry for name, entry in manifest.items())


def _describe(path: Path) -> dict[str, Any]:
    with path.open("rb") as stream:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(stream, "sha256").hexdigest()}

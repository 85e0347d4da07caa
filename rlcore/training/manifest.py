"""Manifests and seals: verify files by length and SHA-256.

A checkpoint's manifest lists all of its files. Data that a run accumulates is written once, to an append-only file next
to its checkpoints. Each checkpoint keeps a seal of constant size. Lines after the sealed prefix belong to iterations
that a resumed run repeats, and are overwritten.
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
    """Lines of a file. Added lines are on disk once :meth:`seal` has returned."""

    def __init__(self, path: Path) -> None:
        self._path, self._pending = path, list[str]()
        self._num_bytes, self._digest = 0, hashlib.sha256()

    def add(self, line: str) -> None:
        """Add a line without line break."""
        self._pending.append(line + "\n")

    def seal(self) -> Seal:
        """Write pending lines and return the seal of the whole file.

        Raises:
            StorageError: The file cannot be written. The lines stay pending.
        """
        data = "".join(self._pending).encode()
        if data:
            try:
                self._write(data)
            except OSError as error:
                raise StorageError(
                    f"the file next to the checkpoints could not be written: {error}",
                    where=str(self._path),
                    fix="free space or correct the permissions, then run the same command again to resume",
                ) from error
            self._digest.update(data)
            self._num_bytes += len(data)
            self._pending.clear()
        return {"bytes": self._num_bytes, "sha256": self._digest.hexdigest()}

    def restore(self, seal: Seal | None) -> Sequence[str]:
        """Continue after the sealed prefix and return its lines; without a seal, restart.

        Raises:
            CheckpointError: The file differs from its seal.
        """
        seal = seal or _EMPTY
        data = _prefix(self._path, seal)
        digest = hashlib.sha256(data)
        if digest.hexdigest() != seal["sha256"]:
            raise CheckpointError(
                "the file next to the checkpoints differs from the seal of the newest checkpoint",
                where=str(self._path),
                fix="restore it from a backup, or remove its folder to restart",
            )
        self._num_bytes, self._digest = len(data), digest
        self._pending.clear()
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
    """Return True if a file begins with the sealed bytes; it may have grown since.

    Raises:
        OSError: The file is missing or cannot be read.
    """
    return bool(hashlib.sha256(_prefix(path, seal)).hexdigest() == seal["sha256"])


def _prefix(path: Path, seal: Seal) -> bytes:
    if not seal["bytes"]:
        return b""
    with path.open("rb") as stream:
        return stream.read(seal["bytes"])


def write_manifest(folder: Path) -> None:
    """Write the manifest of a folder, and flush all of its files to disk."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    manifest = {path.name: _describe(path) for path in files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    for path in (*files, folder / MANIFEST, folder):
        fsync(path)


def matches_manifest(folder: Path, *, at_least: Set[str]) -> bool:
    """Return True if a folder has exactly the files of its manifest, unchanged, and ``at_least`` are among them.

    Raises:
        OSError, ValueError, TypeError, AttributeError: The manifest is missing or invalid.
    """
    manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    there = {path.name for path in folder.iterdir()} - {MANIFEST}
    is_whole = at_least <= manifest.keys() == there
    return is_whole and all(_describe(folder / name) == entry for name, entry in manifest.items())


def _describe(path: Path) -> dict[str, Any]:
    with path.open("rb") as stream:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(stream, "sha256").hexdigest()}

"""The manifest of a folder: the size and SHA-256 of each of its files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Set
from pathlib import Path
from typing import Any

from rlcore.models.saving import fsync

MANIFEST = "MANIFEST.json"


def write_manifest(folder: Path) -> None:
    """State every file of a folder in its manifest; all of it is on the disk then."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    manifest = {path.name: _describe(path) for path in files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    for path in (*files, folder / MANIFEST, folder):
        fsync(path)


def is_as_stated(folder: Path, *, at_least: Set[str]) -> bool:
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

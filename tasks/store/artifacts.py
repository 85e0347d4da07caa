"""Artifacts: content-addressed results in ``artifacts/<kind>/<sha256>/``, with a manifest of their files.

The digest of a folder is the SHA-256 over its sorted (path, SHA-256 of the file) pairs, without times, owners and
location. Equal bytes are thus the same artifact on every machine.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rlcore.errors import StorageError
from rlcore.tasks.store.locks import folder_lock
from rlcore.tasks.store.storage import file_sha256, sync

MANIFEST = "MANIFEST.json"
REPORT = "report.json"  # of a dataset's gate; it stays when the dataset is cleaned
CLEANED = "the artifact was cleaned"
_FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class ArtifactRef:
    """Reference to a folder of files, stored as JSON in caches, task results and tags.

    ``uri`` is relative to the state directory, which can therefore be moved. ``bytes``: total size of the files;
    ``rows``: number of rows, or iterations of a policy (0: neither); ``contract``: the data contract that they passed
    (``preference_pairs/v2``).
    """

    kind: str
    uri: str
    sha256: str
    bytes: int
    rows: int = 0
    contract: str = ""
    stage_key: str = ""
    mlflow_run_id: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, document: Any) -> ArtifactRef:
        """Parse a reference from a document.

        Raises:
            StorageError: it is no object, or a field is missing, unknown or of the wrong type.
        """
        if not isinstance(document, Mapping):
            raise StorageError(f"not a reference to an artifact: {document!r}")
        expected = {field.name: int if field.name in {"bytes", "rows"} else str for field in fields(cls)}
        wrong = [name for name, kind in expected.items() if type(document.get(name)) is not kind]
        if wrong or set(document) != set(expected):
            raise StorageError(f"not a reference to an artifact: {dict(document)!r}")
        return cls(**document)


class ArtifactStore:
    """Artifacts of a state directory. Committed files are never changed."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def commit(self, folder: Path, *, kind: str, rows: int = 0, contract: str = "", stage_key: str = "") -> ArtifactRef:
        """Seal a finished folder and move it into the store.

        Raises:
            StorageError: as :meth:`seal` and :meth:`place`.
        """
        ref = self.seal(folder, kind=kind, rows=rows, contract=contract, stage_key=stage_key)
        self.place(folder, ref)
        return ref

    def seal(self, folder: Path, *, kind: str, rows: int = 0, contract: str = "", stage_key: str = "") -> ArtifactRef:
        """Write the manifest of a finished folder, flush it to disk, and return its future reference.

        Raises:
            StorageError: an empty folder, a link, a special or a half-written file in it, or a write error.
        """
        with _storing(folder):
            digest, size = _seal(folder, kind)
        uri = f"artifacts/{kind}/{digest}"
        return ArtifactRef(
            kind=kind, uri=uri, sha256=digest, bytes=size, rows=rows, contract=contract, stage_key=stage_key
        )

    def place(self, folder: Path, ref: ArtifactRef) -> None:
        """Move a sealed folder into the store, or drop it if the same content is already there.

        ``folder`` must be on the same disk as the store. After the return it no longer exists.
        Raises:
            StorageError: writing fails.
        """
        target = self.root / ref.uri
        with _storing(folder):
            target.parent.mkdir(parents=True, exist_ok=True)
            with folder_lock(target.parent):
                if target.exists() and self.errors(ref):
                    aside = target.with_name(f".damaged-{ref.sha256[:12]}-{uuid.uuid4().hex[:8]}")
                    target.rename(aside)
                    shutil.rmtree(aside)
                if target.exists():  # this very content, perhaps written concurrently
                    os.utime(target)  # it is needed again: :meth:`clean` spares it
                    shutil.rmtree(folder)
                else:
                    folder.rename(target)
                _mark(target).unlink(missing_ok=True)
            sync(target.parent)

    def errors(self, ref: ArtifactRef) -> tuple[str, ...]:
        """Return the errors in the files of ``ref``, found by hashing all of them; empty if they are intact."""
        if absent := self.absence(ref):
            return (absent,)
        folder = self.root / ref.uri
        try:
            return file_errors(folder, listed_files(folder / MANIFEST, ref.sha256))
        except StorageError as error:
            return (error.what,)

    def path(self, ref: ArtifactRef) -> Path:
        """Return the folder of ``ref``.

        Raises:
            StorageError: it does not exist.
        """
        folder = self.root / ref.uri
        if absent := self.absence(ref):
            raise StorageError(
                f"{absent}: {ref.kind} {ref.sha256[:12]}",
                where=str(folder),
                fix="run the pipeline again: it recomputes what is missing",
            )
        return folder

    def absence(self, ref: ArtifactRef) -> str:
        """Say why an artifact does not exist: it was cleaned, or is missing; empty if it exists."""
        folder = self.root / ref.uri
        if (folder / MANIFEST).exists():
            return ""
        try:
            cleaned = datetime.fromtimestamp(_mark(folder).stat().st_mtime, UTC)
        except FileNotFoundError:
            return "the artifact is missing"
        return f"{CLEANED} on {cleaned:%Y-%m-%d}"

    def report_path(self, ref: ArtifactRef) -> Path:
        """Return the path of a dataset's report, which outlives a cleaned dataset."""
        path = self.root / ref.uri / REPORT
        return path if path.exists() else _mark(self.root / ref.uri)

    def clean(self, uri: str, *, before: float) -> bool:
        """Remove an artifact that was placed before a time; return False if it was placed again, or is gone.

        A mark stays, by which :meth:`absence` tells it from a loss. A kill leaves at most files that no command reads.
        """
        folder = self.root / uri
        aside = folder.with_name(f".tmp-cleaned-{folder.name[:12]}-{uuid.uuid4().hex[:8]}")
        with folder_lock(folder.parent):
            if not folder.exists() or folder.stat().st_mtime > before:
                return False
            shutil.copyfile(folder / REPORT if (folder / REPORT).is_file() else os.devnull, _mark(folder))
            sync(_mark(folder))
            folder.rename(aside)
            sync(folder.parent)
        shutil.rmtree(aside)
        return True


def listed_files(manifest: Path, sha256: str) -> Mapping[str, str]:
    """Return the digests of an artifact's files by path, from the manifest of the artifact ``sha256``.

    Raises:
        StorageError: it cannot be read, or belongs to another artifact.
    """
    try:
        files = json.loads(manifest.read_text(encoding="utf-8"))["files"]
        listed, digest = {str(entry["path"]): str(entry["sha256"]) for entry in files}, _digest(files)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StorageError(f"the manifest is damaged: {error}", where=str(manifest)) from error
    if digest != sha256:
        raise StorageError("the manifest is not that of the reference", where=str(manifest))
    return listed


def file_errors(folder: Path, listed: Mapping[str, str]) -> tuple[str, ...]:
    """Return the errors in files whose digests are listed by path; the manifest itself is not listed."""
    found = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if not _is_folder(path)}
    found.pop(MANIFEST, None)
    missing = [f"{name} is missing" for name in sorted(listed.keys() - found.keys())]
    extra = [f"{name} does not belong to it" for name in sorted(found.keys() - listed.keys())]
    common = sorted(listed.keys() & found.keys())
    damaged = [f"{name} is damaged" for name in common if not _is_intact(found[name], listed[name])]
    return (*missing, *extra, *damaged)


def _seal(folder: Path, kind: str) -> tuple[str, int]:
    files = [_describe(folder, path) for path in sorted(folder.rglob("*")) if not _is_folder(path)]
    files = [entry for entry in files if entry["path"] != MANIFEST]
    if not files:
        raise StorageError("the stage wrote no file, so there is nothing to store", where=str(folder))
    digest = _digest(files)
    manifest = {"format": _FORMAT, "kind": kind, "sha256": digest, "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    for path in (*folder.rglob("*"), folder):
        sync(path)
    return digest, sum(entry["bytes"] for entry in files)


@contextmanager
def _storing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(f"cannot store the artifact: {error.strerror}", where=str(folder)) from error


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _describe(folder: Path, path: Path) -> dict[str, Any]:
    if path.is_symlink() or not path.is_file():
        raise StorageError(
            "an artifact may contain only plain files, and this is a link or a special file",
            where=str(path),
            fix="copy the file instead of linking to it",
        )
    if path.name.startswith(".") and path.suffix == ".tmp":
        raise StorageError(
            "a file that was never finished is about to become part of a result",
            where=str(path),
            fix="remove it, then start the same command again",
        )
    return {"path": path.relative_to(folder).as_posix(), "bytes": path.stat().st_size, "sha256": file_sha256(path)}


def _digest(files: list[dict[str, Any]]) -> str:
    pairs = sorted((entry["path"], entry["sha256"]) for entry in files)
    return hashlib.sha256(json.dumps(pairs).encode()).hexdigest()


def _mark(folder: Path) -> Path:
    """Return the file that a cleaned artifact leaves: its report, or empty."""
    return folder.with_name(f"{folder.name}.cleaned")


def _is_intact(path: Path, sha256: str) -> bool:
    try:
        return path.is_file() and file_sha256(path) == sha256
    except OSError:  # an unreadable file counts as lost, and is computed again
        return False

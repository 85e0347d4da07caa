"""Shared store: results of stages at one URL, for several state directories on several machines.

``RLCORE_STORE`` names it: ``s3://bucket/folder``, or any URL that fsspec knows. Its layout::

    rlcore-store.json                     the format
    artifacts/<kind>/<sha256>/…           files of an artifact, whole if MANIFEST.json exists: it is written last
    records/<stage>/<key>/<key>.json      records of the results that serve a key, as in a state directory's cache
    claims/<stage>/<key>                  exists while a process computes the result

No object is ever changed but a claim, so no rename and no lock of a file system is needed. Whoever can write to the
store is trusted as whoever can write to the state directory.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath

from rlcore.errors import StorageError
from rlcore.tasks.store.artifacts import MANIFEST, ArtifactRef, ArtifactStore, file_errors, listed_files
from rlcore.tasks.store.cache import Record, StageCache, parse_record
from rlcore.tasks.store.remote import RemoteFolder
from rlcore.tasks.store.scratch import scratch_folder
from rlcore.tasks.store.settings import Home

VARIABLE = "RLCORE_STORE"
_FORMAT = 1
_ABOUT = "rlcore-store.json"


@dataclass(frozen=True, kw_only=True)
class Published:
    """Artifact in the store. ``files``: bytes by path; ``time``: that of the manifest, in seconds since 1970."""

    uri: str
    files: Mapping[str, int]
    time: float


@dataclass(frozen=True)
class SharedStore:
    """Results at a URL. Every method raises :class:`rlcore.tasks.store.remote.RemoteError` if there is no answer."""

    url: str

    @cached_property
    def folder(self) -> RemoteFolder:
        """The store's folder."""
        fix = f"look at its address and credentials, or unset {VARIABLE}: this machine then computes for itself"
        return RemoteFolder(url=self.url, name=f"the shared store of {VARIABLE}", fix=fix)

    def require_usable(self) -> None:
        """Note the format in an empty store.

        Raises:
            StorageError: a newer rlcore wrote the store.
        """
        if not self.folder.exists(_ABOUT):
            self.folder.create(_ABOUT, json.dumps({"format": _FORMAT}).encode())
        try:
            found = json.loads(self.folder.read(_ABOUT) or b"")["format"]
        except (ValueError, KeyError, TypeError):
            found = "unknown"
        if found != _FORMAT:
            raise StorageError(
                f"the shared store has format {found}, and this rlcore knows {_FORMAT}",
                where=self.url,
                fix=f"install the rlcore that wrote it, or set {VARIABLE} to another folder",
            )

    def records(self, stage: str, key: str) -> tuple[Record, ...]:
        """Return the records of the results that serve a key. One that is damaged, or was cleaned, counts as absent."""
        names = sorted(self.folder.sizes(f"records/{stage}/{key}"))
        read = [parse_record(self.folder.read(name) or b"", stage, PurePosixPath(name).stem) for name in names]
        return tuple(record for record in read if record is not None and self._has(record.ref.uri))

    def fetch(self, ref: ArtifactRef, home: Home) -> None:
        """Bring an artifact into a state directory, after comparing each file with its digest.

        Raises:
            StorageError: the artifact is incomplete or damaged there.
        """
        with scratch_folder(home.work) as scratch:
            folder = scratch / ref.sha256
            folder.mkdir()
            self._get(ref, MANIFEST, folder)
            listed = listed_files(folder / MANIFEST, ref.sha256)
            for name in listed:
                self._get(ref, name, folder)
            if errors := file_errors(folder, listed):
                raise self._damaged(ref, errors[0])
            ArtifactStore(home.root).place(folder, ref)

    def publish(self, stage: str, key: str, record: Record, home: Home) -> bool:
        """Copy a result that serves a key into the store; return False if it is there already.

        If there is no answer, what was copied stays, and a repeated call completes it.
        """
        folder, target = ArtifactStore(home.root).path(record.ref), _record(stage, key, record)
        is_whole = self._has(record.ref.uri)
        if is_whole and self.folder.exists(target):
            return False
        if not is_whole:
            for name in (*listed_files(folder / MANIFEST, record.ref.sha256), MANIFEST):
                self.folder.put(folder / name, f"{record.ref.uri}/{name}")
        self.folder.put(StageCache(home.cache).path(stage, record.key), target)
        return True

    def withdraw(self, stage: str, key: str, record: Record) -> None:
        """Remove the record of a damaged artifact and its manifest, so that it is published again."""
        self.folder.remove(_record(stage, key, record))
        self.folder.remove(f"{record.ref.uri}/{MANIFEST}")

    def published(self) -> Iterator[Published]:
        """Yield all artifacts, partial ones too."""
        files: dict[str, dict[str, int]] = defaultdict(dict)
        for path, size in self.folder.sizes("artifacts").items():
            files["/".join(path.split("/")[:3])][path] = size
        for uri, sizes in files.items():
            yield Published(uri=uri, files=sizes, time=self._time(uri, sizes))

    def clean(self, artifact: Published, *, before: float) -> bool:
        """Remove an artifact unless it was published again since ``before``, or is gone; return True if it was removed.

        Its records stay and count as absent. Who publishes or fetches it meanwhile finds it damaged and computes it.
        """
        if not 0.0 < self._time(artifact.uri, artifact.files) < before:
            return False
        for path in (f"{artifact.uri}/{MANIFEST}", *artifact.files):
            self.folder.remove(path)
        return True

    def claim(self, stage: str, key: str, owner: str) -> bool:
        """Claim a key for ``owner``; return False if another process has it."""
        return self.folder.create(_claim(stage, key), owner.encode())

    def renew(self, stage: str, key: str, owner: str) -> None:
        """Show that the owner of a claim lives: ``owner`` differs from what it was."""
        self.folder.write(_claim(stage, key), owner.encode())

    def claimant(self, stage: str, key: str) -> str:
        """Return what the owner of a claim last wrote; empty if there is no claim."""
        return (self.folder.read(_claim(stage, key)) or b"").decode()

    def release(self, stage: str, key: str) -> None:
        """Remove a claim."""
        self.folder.remove(_claim(stage, key))

    def _time(self, uri: str, files: Collection[str]) -> float:
        manifest = f"{uri}/{MANIFEST}"
        return self.folder.modified(manifest if manifest in files else max(files))

    def _has(self, uri: str) -> bool:
        return self.folder.exists(f"{uri}/{MANIFEST}")

    def _get(self, ref: ArtifactRef, name: str, folder: Path) -> None:
        inside = PurePosixPath(name)
        if inside.is_absolute() or ".." in inside.parts or ref.uri != f"artifacts/{ref.kind}/{ref.sha256}":
            raise self._damaged(ref, f"{name} lies outside of it")
        target = folder / inside
        target.parent.mkdir(parents=True, exist_ok=True)
        if not self.folder.get(f"{ref.uri}/{name}", target):
            raise self._damaged(ref, f"{name} is missing")

    def _damaged(self, ref: ArtifactRef, what: str) -> StorageError:
        return StorageError(f"the artifact {ref.kind} {ref.sha256[:12]} is damaged: {what}", where=self.url)


def open_shared_store() -> SharedStore | None:
    """Return the store that ``RLCORE_STORE`` names, or None."""
    url = os.environ.get(VARIABLE, "")
    return SharedStore(url) if url else None


def _claim(stage: str, key: str) -> str:
    return f"claims/{stage}/{key}"


def _record(stage: str, key: str, record: Record) -> str:
    return f"records/{stage}/{key}/{record.key}.json"

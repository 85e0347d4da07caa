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
import shutil
import socket
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from rlcore.errors import ConfigError, RlcoreError, StorageError
from rlcore.extras import install_command
from rlcore.tasks.store.artifacts import MANIFEST, ArtifactRef, ArtifactStore, file_errors, listed_files
from rlcore.tasks.store.cache import Record, StageCache, parse_record
from rlcore.tasks.store.locks import scratch_folder
from rlcore.tasks.store.passwords import has_secret
from rlcore.tasks.store.settings import Home
from rlcore.tasks.store.storage import write_bytes

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem


VARIABLE = "RLCORE_STORE"
_FORMAT = 1
_ABOUT = "rlcore-store.json"
_BUCKETS = {"s3", "gs", "az", "oss"}  # protocols without folders


class RemoteError(StorageError):
    """A folder at a URL did not answer, or refused."""


@dataclass(frozen=True, kw_only=True)
class RemoteFolder:
    """Folder at a URL. Paths are relative to it; on a disk, a killed write leaves the old file, or none.

    ``name`` and ``fix`` are for errors: what the folder is, and what to do if it cannot be used. Every method raises
    :class:`RemoteError` if there is no answer.
    """

    url: str
    name: str
    fix: str

    @cached_property
    def _opened(self) -> tuple[AbstractFileSystem, str]:
        import fsspec

        if has_secret(self.url):
            raise ConfigError(f"a password in the URL of {self.name}", fix="give credentials by environment variables")
        try:
            files, root = fsspec.url_to_fs(self.url, use_listings_cache=False)
        except (ImportError, ValueError) as error:
            is_s3 = self.url.startswith("s3://")
            fix = install_command("store") if is_s3 else "install its package, or name a folder or s3://bucket/folder"
            raise ConfigError(f"{self.name} cannot be opened: {error}", where=self.url, fix=fix) from error
        return files, root.rstrip("/")

    @cached_property
    def disk(self) -> Path | None:
        """The folder, if it is on a disk of this machine.

        Raises:
            ConfigError: an unknown protocol, a missing package, or a password in the URL.
        """
        from fsspec.implementations.local import LocalFileSystem

        files, root = self._opened
        return Path(root) if isinstance(files, LocalFileSystem) else None

    def exists(self, path: str) -> bool:
        with self._answering():
            return bool(self._opened[0].exists(self._place(path)))

    def sizes(self, folder: str) -> dict[str, int]:
        """Return the bytes of all files below a folder by their paths."""
        with self._answering():
            files, root = self._opened
            found = files.find(self._place(folder), detail=True)
        return {path[path.index(root) + len(root) + 1 :]: int(about["size"]) for path, about in found.items()}

    def modified(self, path: str) -> float:
        """Return when a file was last written, in seconds since 1970; 0 if there is none."""
        with self._answering(), suppress(FileNotFoundError):
            return float(self._opened[0].modified(self._place(path)).timestamp())
        return 0.0

    def read(self, path: str) -> bytes | None:
        """Return a file's content; None if there is none."""
        with self._answering(), suppress(FileNotFoundError):
            return bytes(self._opened[0].cat_file(self._place(path)))
        return None

    def write(self, path: str, content: bytes) -> None:
        with self._answering():
            place = self._made(path)
            if self.disk:
                write_bytes(content, Path(place))
            else:
                self._opened[0].pipe_file(place, content)

    def create(self, path: str, content: bytes) -> bool:
        """Write a file unless it exists; return True if this call has written it."""
        with self._answering(), suppress(FileExistsError):
            place = self._made(path)
            if self.disk:  # fsspec looks first and writes then
                with Path(place).open("xb") as file:
                    file.write(content)
            else:
                self._opened[0].pipe_file(place, content, mode="create")
            return True
        return False

    def put(self, source: Path, path: str) -> None:
        """Copy a file here.

        Raises:
            FileNotFoundError: ``source`` was removed.
        """
        with self._answering(source):
            place = self._made(path)
            if self.disk:
                aside = Path(f"{place}.{socket.gethostname()}.tmp")
                shutil.copyfile(source, aside)
                aside.replace(place)
            else:
                self._opened[0].put_file(str(source), place)

    def get(self, path: str, target: Path) -> bool:
        """Copy a file from here; return False if there is none."""
        with self._answering(), suppress(FileNotFoundError):
            self._opened[0].get_file(self._place(path), str(target))
            return True
        return False

    def remove(self, path: str) -> None:
        with self._answering(), suppress(FileNotFoundError):
            self._opened[0].rm_file(self._place(path))

    def _place(self, path: str) -> str:
        return f"{self._opened[1]}/{path}"

    def _made(self, path: str) -> str:
        """Return the place of a file whose folder exists. A bucket is not made: its name is misspelled then."""
        files, place = self._opened[0], self._place(path)
        if self.disk:
            self.disk.mkdir(parents=True, exist_ok=True)
        if not _BUCKETS & set(files.protocol if isinstance(files.protocol, tuple) else (files.protocol,)):
            files.makedirs(place.rpartition("/")[0], exist_ok=True)
        return place

    @contextmanager
    def _answering(self, source: Path | None = None) -> Iterator[None]:
        """Convert all errors of the folder; that ``source`` has vanished is none of them."""
        try:
            yield
        except RlcoreError:
            raise
        except Exception as error:  # each protocol has errors of its own
            if source and not source.exists():
                raise
            raise RemoteError(
                f"{self.name} cannot be used: {type(error).__name__}: {str(error)[:300]}", where=self.url, fix=self.fix
            ) from error


@dataclass(frozen=True, kw_only=True)
class Published:
    """Artifact in the store. ``files``: bytes by path; ``time``: that of the manifest, in seconds since 1970."""

    uri: str
    files: Mapping[str, int]
    time: float


@dataclass(frozen=True)
class SharedStore:
    """Results at a URL. Methods raise as those of :class:`RemoteFolder`."""

    url: str

    @cached_property
    def folder(self) -> RemoteFolder:
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

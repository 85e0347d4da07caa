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
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from rlcore.errors import ConfigError, StorageError
from rlcore.extras import install_command
from rlcore.tasks.store.artifacts import MANIFEST, ArtifactRef, ArtifactStore, file_errors, listed_files
from rlcore.tasks.store.cache import Record, StageCache, parse_record
from rlcore.tasks.store.scratch import scratch_folder
from rlcore.tasks.store.settings import Home

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

VARIABLE = "RLCORE_STORE"
_FORMAT = 1
_ABOUT = "rlcore-store.json"
_BUCKETS = {"s3", "gs", "az", "oss"}  # protocols without folders


class StoreAwayError(StorageError):
    """The shared store did not answer, or refused."""


@dataclass(frozen=True)
class SharedStore:
    """Results at a URL."""

    url: str

    @cached_property
    def _place(self) -> tuple[AbstractFileSystem, str]:
        import fsspec

        try:
            files, root = fsspec.core.url_to_fs(self.url, use_listings_cache=False)
        except (ValueError, ImportError) as error:
            protocol = self.url.partition("://")[0]
            fix = install_command("store") if protocol == "s3" else "name a folder, or a URL such as s3://bucket/folder"
            raise ConfigError(f"{self.url!r} cannot be opened: {error}", where=VARIABLE, fix=fix) from error
        return files, root.rstrip("/")

    def require_usable(self) -> None:
        """Note the format in an empty store.

        Raises:
            StorageError: a newer rlcore wrote the store.
            StoreAwayError: it cannot be reached or written.
        """
        with self._answering():
            files, root = self._place
            path = f"{root}/{_ABOUT}"
            if not files.exists(path):
                self._make_folder(root)
                files.pipe_file(path, json.dumps({"format": _FORMAT}).encode())
            found = json.loads(files.cat_file(path))["format"]
        if found != _FORMAT:
            raise StorageError(
                f"the shared store has format {found}, and this rlcore knows {_FORMAT}",
                where=self.url,
                fix=f"install the rlcore that wrote it, or set {VARIABLE} to another folder",
            )

    def records(self, stage: str, key: str) -> tuple[Record, ...]:
        """Return the records of the results that serve a key. A damaged one counts as absent.

        Raises:
            StoreAwayError: no answer.
        """
        with self._answering():
            files, root = self._place
            folder = f"{root}/records/{stage}/{key}"
            names = sorted(files.ls(folder, detail=False)) if files.exists(folder) else []
            read = [parse_record(files.cat_file(name), stage, PurePosixPath(name).stem) for name in names]
        return tuple(record for record in read if record is not None)

    def fetch(self, ref: ArtifactRef, home: Home) -> None:
        """Bring an artifact into a state directory, after comparing each file with its digest.

        Raises:
            StorageError: the artifact is incomplete or damaged there.
            StoreAwayError: no answer.
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

        Raises:
            StoreAwayError: no answer. What was copied stays, and a repeated call completes it.
        """
        folder = ArtifactStore(home.root).path(record.ref)
        with self._answering():
            files, root = self._place
            target = f"{root}/records/{stage}/{key}/{record.key}.json"
            if files.exists(target):
                return False
            there = f"{root}/{record.ref.uri}"
            if not files.exists(f"{there}/{MANIFEST}"):
                for name in (*listed_files(folder / MANIFEST, record.ref.sha256), MANIFEST):
                    self._make_folder(str(PurePosixPath(f"{there}/{name}").parent))
                    files.put_file(str(folder / name), f"{there}/{name}")
            self._make_folder(str(PurePosixPath(target).parent))
            files.put_file(str(StageCache(home.cache).path(stage, record.key)), target)
        return True

    def withdraw(self, stage: str, key: str, record: Record) -> None:
        """Remove the record of a damaged artifact and its manifest, so that it is published again.

        Raises:
            StoreAwayError: no answer.
        """
        with self._answering():
            files, root = self._place
            for path in (f"records/{stage}/{key}/{record.key}.json", f"{record.ref.uri}/{MANIFEST}"):
                if files.exists(f"{root}/{path}"):
                    files.rm_file(f"{root}/{path}")

    def remove(self, path: str) -> None:
        """Remove a file of an artifact, and its manifest first, without which the artifact counts as absent.

        Raises:
            StoreAwayError: no answer.
        """
        with self._answering():
            files, root = self._place
            artifact = PurePosixPath(*PurePosixPath(path).parts[:3])
            for each in (f"{root}/{artifact}/{MANIFEST}", f"{root}/{path}"):
                if files.exists(each):
                    files.rm_file(each)

    def claim(self, stage: str, key: str, owner: str) -> bool:
        """Claim a key for ``owner``; return False if another process has it.

        Raises:
            StoreAwayError: no answer.
        """
        with self._answering():
            files, _ = self._place
            path = self._claim(stage, key)
            self._make_folder(str(PurePosixPath(path).parent))
            try:
                if "file" in files.protocol:  # fsspec looks first and writes then
                    with Path(path).open("xb") as file:
                        file.write(owner.encode())
                else:
                    files.pipe_file(path, owner.encode(), mode="create")
            except FileExistsError:
                return False
        return True

    def renew(self, stage: str, key: str, owner: str) -> None:
        """Show that the owner of a claim lives: ``owner`` differs from what it was.

        Raises:
            StoreAwayError: no answer.
        """
        with self._answering():
            self._place[0].pipe_file(self._claim(stage, key), owner.encode())

    def claimant(self, stage: str, key: str) -> str:
        """Return what the owner of a claim last wrote; empty if there is no claim.

        Raises:
            StoreAwayError: no answer.
        """
        with self._answering():
            try:
                return str(self._place[0].cat_file(self._claim(stage, key)).decode())
            except FileNotFoundError:
                return ""

    def release(self, stage: str, key: str) -> None:
        """Remove a claim.

        Raises:
            StoreAwayError: no answer.
        """
        with self._answering():
            try:
                self._place[0].rm_file(self._claim(stage, key))
            except FileNotFoundError:
                return

    def _make_folder(self, path: str) -> None:
        """Make a folder, where there are folders. A bucket is not made: its name is misspelled then."""
        files = self._place[0]
        if not _BUCKETS & set(files.protocol if isinstance(files.protocol, tuple) else (files.protocol,)):
            files.makedirs(path, exist_ok=True)

    def _claim(self, stage: str, key: str) -> str:
        return f"{self._place[1]}/claims/{stage}/{key}"

    def _get(self, ref: ArtifactRef, name: str, folder: Path) -> None:
        inside = PurePosixPath(name)
        if inside.is_absolute() or ".." in inside.parts or ref.uri != f"artifacts/{ref.kind}/{ref.sha256}":
            raise self._damaged(ref, f"{name} lies outside of it")
        target = folder / inside
        target.parent.mkdir(parents=True, exist_ok=True)
        with self._answering():
            files, root = self._place
            try:
                files.get_file(f"{root}/{ref.uri}/{name}", str(target))
            except FileNotFoundError as error:
                raise self._damaged(ref, f"{name} is missing") from error

    def _damaged(self, ref: ArtifactRef, what: str) -> StorageError:
        return StorageError(f"the artifact {ref.kind} {ref.sha256[:12]} is damaged: {what}", where=self.url)

    @contextmanager
    def _answering(self) -> Iterator[None]:
        try:
            yield
        except (StorageError, ConfigError):
            raise
        except Exception as error:  # each kind of store has errors of its own
            raise StoreAwayError(
                f"the shared store cannot be used: {type(error).__name__}: {str(error)[:300]}",
                where=self.url,
                fix=f"look at its address and credentials, or unset {VARIABLE}: this machine then computes for itself",
            ) from error


def open_shared_store() -> SharedStore | None:
    """Return the store that ``RLCORE_STORE`` names, or None."""
    url = os.environ.get(VARIABLE, "")
    return SharedStore(url) if url else None

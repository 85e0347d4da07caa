"""Target of backups, a folder or a URL of fsspec: contents by digest, and a manifest for each backup.

``content/<2 digits>/<sha256>`` has the bytes of a file. All backups share it, so unchanged files are stored once.
``manifests/<name>.json`` lists the files of a backup. It is written last: without it there is no backup.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Any

from rlcore.errors import StorageError
from rlcore.tasks.store.remote import RemoteFolder
from rlcore.tasks.store.settings import Home
from rlcore.tasks.store.storage import read_json, write_json

NAME = "%Y%m%dT%H%M%S%f"  # of a backup: its time
_FORMAT = 1
_CONTENT, _MANIFESTS = "content", "manifests"
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True)
class BackupFile:
    """File of a backup.

    Attributes:
        path: Relative to the state directory.
        modified: Nanoseconds.
        link: Path of an earlier file of the backup that was the same file on disk (a hard link), or empty.
    """

    path: str
    sha256: str
    bytes: int
    modified: int
    link: str = ""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """List of the files of a backup.

    Attributes:
        name: Time of the backup as a file name.
        versions: Versions that wrote the state directory, and its formats.
        running: Experiments of the runs that were active.
        left_out: Reasons by path.
    """

    name: str
    versions: Mapping[str, Any]
    running: tuple[str, ...]
    left_out: Mapping[str, str]
    files: tuple[BackupFile, ...]

    @property
    def time(self) -> datetime:
        """Time at which the backup began."""
        return datetime.strptime(self.name, NAME).replace(tzinfo=UTC)

    @property
    def size(self) -> int:
        """Total bytes, hard links counted once."""
        return sum(each.bytes for each in self.files if not each.link)

    @property
    def seal(self) -> str:
        """Digest of all other fields."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()

    def to_json(self) -> str:
        return json.dumps({"format": _FORMAT, **asdict(self), "seal": self.seal})

    @classmethod
    def from_json(cls, text: bytes, where: str) -> Manifest:
        """Parse a manifest.

        Raises:
            StorageError: it is damaged, or was written by a newer version.
        """
        try:
            values = json.loads(text)
            written, seal = values.pop("format"), values.pop("seal")
            if written != _FORMAT:
                raise StorageError(f"the backup has format {written!r}, this rlcore knows {_FORMAT}", where=where)
            files = tuple(BackupFile(**each) for each in values.pop("files"))
            if any(PurePosixPath(each.path).is_absolute() or ".." in each.path.split("/") for each in files):
                raise StorageError("a path of the backup leads out of the state directory", where=where, fix=_OLDER)
            manifest = cls(**values | {"files": files, "running": tuple(values["running"])})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise StorageError(f"the manifest is damaged: {error}", where=where, fix=_OLDER) from error
        if manifest.seal != seal:
            raise StorageError("the manifest was changed after it was written", where=where, fix=_OLDER)
        return manifest


def note_backup(home: Home, manifest: Manifest, target: str) -> dict[str, Any]:
    """Record the newest backup of this state, or the one that it was restored from; return the record."""
    time = manifest.time.isoformat(timespec="seconds")
    last = {"name": manifest.name, "time": time, "target": target, "bytes": manifest.size}
    write_json(last, _last(home))
    return last


def last_backup(home: Home) -> dict[str, Any] | None:
    """Return the record of :func:`note_backup`; None if there is none."""
    path = _last(home)
    last: dict[str, Any] | None = read_json(path) if path.is_file() else None
    return last


def _last(home: Home) -> Path:
    return home.root / "backups" / "last.json"


_OLDER = "restore another backup (--at NAME), or remove this file"


class BackupTarget:
    """Folder, or URL such as ``s3://bucket/rlcore``, with the backups of one state directory.

    Every method raises :class:`rlcore.tasks.store.remote.RemoteError` if the target does not answer.
    """

    def __init__(self, url: str) -> None:
        """Open a target.

        Raises:
            ConfigError: an unknown protocol, a missing package, or a password in the URL.
        """
        fix = "check its address, space and credentials"
        self._files = RemoteFolder(url=url, name="the target of backups", fix=fix, mode=0o700)  # prompts, models
        self.folder = self._files.disk
        self.url = str(self.folder or url)

    def names(self) -> tuple[str, ...]:
        """Return the names of all backups, oldest first."""
        paths = map(PurePosixPath, self._files.sizes(_MANIFESTS))
        return tuple(sorted(path.stem for path in paths if path.suffix == ".json"))

    def contents(self) -> dict[str, int]:
        """Return the sizes of all contents by digest."""
        sizes = {path.rpartition("/")[2]: size for path, size in self._files.sizes(_CONTENT).items()}
        return {name: size for name, size in sizes.items() if _DIGEST.fullmatch(name)}

    def put(self, source: Path, sha256: str) -> None:
        """Store a file's content.

        Raises:
            FileNotFoundError: the file was removed.
        """
        self._files.put(source, _content(sha256))

    def get(self, sha256: str, path: Path) -> bool:
        """Write a content to ``path``; return False if the target lacks it."""
        return self._files.get(_content(sha256), path)

    def write(self, manifest: Manifest) -> None:
        """Write the manifest of a backup whose contents are stored."""
        if self.folder:
            os.sync()  # contents first, also in a power cut
        self._files.write(f"{_MANIFESTS}/{manifest.name}.json", manifest.to_json().encode())

    def read(self, name: str) -> Manifest:
        """Read the manifest of a backup.

        Raises:
            StorageError: missing, damaged, or of a newer version.
        """
        path = f"{_MANIFESTS}/{name}.json"
        content = self._files.read(path)
        if content is None:
            raise StorageError("the target has no such backup", where=f"{self.url}/{path}", fix=_OLDER)
        return Manifest.from_json(content, where=f"{self.url}/{path}")

    def remove(self, names: Collection[str], contents: Collection[str]) -> None:
        """Remove backups, then contents that no backup needs."""
        for path in (*(f"{_MANIFESTS}/{name}.json" for name in names), *map(_content, contents)):
            self._files.remove(path)


def _content(sha256: str) -> str:
    return f"{_CONTENT}/{sha256[:2]}/{sha256}"

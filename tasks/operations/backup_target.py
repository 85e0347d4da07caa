"""Target of backups, a folder or a URL of fsspec: contents by digest, and a manifest for each backup.

``content/<2 digits>/<sha256>`` has the bytes of a file. All backups share it, so unchanged files are stored once.
``manifests/<name>.json`` lists the files of a backup. It is written last: without it there is no backup.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from rlcore.errors import ConfigError, RlcoreError, StorageError
from rlcore.tasks.store.passwords import has_secret
from rlcore.tasks.store.storage import write_bytes

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


_OLDER = "restore another backup (--at NAME), or remove this file"


class BackupTarget:
    """Folder, or URL such as ``s3://bucket/rlcore``, with the backups of one state directory."""

    def __init__(self, url: str) -> None:
        """Open a target.

        Raises:
            ConfigError: an unknown protocol, a missing package, or a password in the URL.
        """
        import fsspec
        from fsspec.implementations.local import LocalFileSystem

        if has_secret(url):
            raise ConfigError("a password in the URL of a backup", fix="give credentials by environment variables")
        try:
            self._files, self._root = fsspec.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise ConfigError(f"cannot open the target: {error}", where=url, fix="pip install its package") from error
        self.folder = Path(self._root) if isinstance(self._files, LocalFileSystem) else None
        self.url = str(self.folder or url)

    def names(self) -> tuple[str, ...]:
        """Return the names of all backups, oldest first."""
        return tuple(sorted(path.removesuffix(".json") for path in self._find(_MANIFESTS) if path.endswith(".json")))

    def contents(self) -> dict[str, int]:
        """Return the sizes of all contents by digest."""
        return {name: size for name, size in self._find(_CONTENT).items() if _DIGEST.fullmatch(name)}

    def put(self, source: Path, sha256: str) -> None:
        """Store a file's content. A killed copy into a folder has another name.

        Raises:
            FileNotFoundError: the file was removed.
        """
        place = self._place(sha256)
        with self._reached(source):
            if self.folder is None:
                self._files.put_file(str(source), place)
                return
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # it has prompts and models
            Path(place).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, f"{place}.tmp")
            Path(f"{place}.tmp").replace(place)

    def get(self, sha256: str, path: Path) -> bool:
        """Write a content to ``path``; return False if the target lacks it."""
        with self._reached():
            try:
                self._files.get_file(self._place(sha256), str(path))
            except FileNotFoundError:
                return False
        return True

    def write(self, manifest: Manifest) -> None:
        """Write the manifest of a backup whose contents are stored."""
        content, place = manifest.to_json().encode(), f"{self._root}/{_MANIFESTS}/{manifest.name}.json"
        with self._reached():
            if self.folder is None:
                self._files.pipe_file(place, content)
            else:
                os.sync()  # contents first, also in a power cut
                write_bytes(content, Path(place))

    def read(self, name: str) -> Manifest:
        """Read the manifest of a backup.

        Raises:
            StorageError: missing, damaged, or of a newer version.
        """
        place = f"{self._root}/{_MANIFESTS}/{name}.json"
        with self._reached():
            return Manifest.from_json(self._files.cat_file(place), where=f"{self.url}/{_MANIFESTS}/{name}.json")

    def remove(self, names: Collection[str], contents: Collection[str]) -> None:
        """Remove backups, then contents that no backup needs."""
        with self._reached():
            for name in names:
                self._files.rm_file(f"{self._root}/{_MANIFESTS}/{name}.json")
            for sha256 in contents:
                self._files.rm_file(self._place(sha256))

    def _place(self, sha256: str) -> str:
        return f"{self._root}/{_CONTENT}/{sha256[:2]}/{sha256}"

    def _find(self, folder: str) -> dict[str, int]:
        """Return the sizes of the files below a folder by their last names."""
        with self._reached():
            self._files.invalidate_cache()
            found = self._files.find(f"{self._root}/{folder}", detail=True)
        return {path.rpartition("/")[2]: int(about["size"]) for path, about in found.items()}

    @contextmanager
    def _reached(self, source: Path | None = None) -> Iterator[None]:
        """Convert all errors of the target; that ``source`` has vanished is none of them."""
        try:
            yield
        except RlcoreError:
            raise
        except Exception as error:  # each protocol has its own
            if source and not source.exists():
                raise
            raise StorageError(
                f"the target of backups failed: {error}", where=self.url, fix="check its address, space and credentials"
            ) from error

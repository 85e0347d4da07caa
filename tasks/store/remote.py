"""Folder at a URL: on a disk, in a bucket, or wherever else fsspec reads and writes."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from rlcore.errors import ConfigError, RlcoreError, StorageError
from rlcore.extras import install_command
from rlcore.tasks.store.passwords import has_secret
from rlcore.tasks.store.storage import write_bytes

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

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
        """Return True if there is such a file."""
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
        """Write a file."""
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
        """Remove a file, if it exists."""
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

"""Backup of a state directory: databases by their own tools, other files by digest, a manifest last.

The order makes it consistent while runs are active: records of results first, then the databases that know their runs,
then other files, artifacts last. A file is thus copied before what it refers to, which is never changed. Folders that a
run changes are in the backup as of one moment, or are named in the manifest. Passwords are in no backup.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from fnmatch import fnmatch
from pathlib import Path

from rlcore.errors import ConfigError, StorageError
from rlcore.tasks.operations.backup_target import NAME, BackupFile, BackupTarget, Manifest, note_backup
from rlcore.tasks.operations.postgres import DUMPS, dump_databases, services_folder
from rlcore.tasks.pipeline.earlier_work import WORK_INPUTS
from rlcore.tasks.pipeline.leases import HALF_WRITTEN, held_leases, leased, startup_lock
from rlcore.tasks.store.artifacts import MANIFEST, file_sha256, listed_files
from rlcore.tasks.store.audit_log import record_action
from rlcore.tasks.store.locks import file_lock
from rlcore.tasks.store.scratch import scratch_folder
from rlcore.tasks.store.settings import Home
from rlcore.tasks.store.state import copy_database, read_versions

_ACTION = "backup"
_TRIES = 3
_EMBEDDED = ("mlflow.db", "prefect/prefect.db")
_APART = ("cache", "leases", "work", "checkpoints", "artifacts", "mlartifacts")  # top folders with a place in the order
_NEVER = ("backups", "prefect", "services")  # copies of databases; folders of servers, with passwords
_VARIABLES = {"mlflow": "MLFLOW_TRACKING_URI", "prefect": "PREFECT_API_URL"}


@dataclass(frozen=True, kw_only=True)
class Backup:
    """Finished backup. ``copied``: bytes that the target lacked; ``removed``: names of removed older backups."""

    manifest: Manifest
    target: str
    copied: int
    removed: tuple[str, ...]


def back_up(home: Home, url: str, *, keep: int = 0) -> Backup:
    """Write a backup of the state directory; keep the ``keep`` newest ones, or all if it is 0.

    Raises:
        ConfigError: the target cannot be opened, or is in the state directory.
        StorageError: another backup is active, or the target cannot be written.
        ServiceError: the services' databases cannot be read.
    """
    target = BackupTarget(url)
    if target.folder and target.folder.resolve().is_relative_to(home.root.resolve()):
        raise ConfigError("the target is in the state directory", where=url, fix="name a folder on another disk")
    with leased(home, _ACTION) as lease, file_lock(home.root / "backup.lock", wait=False) as is_free:
        if not is_free:
            raise StorageError("another backup is active", where=str(home.root), fix="wait until it has ended")
        name, copier = datetime.now(UTC).strftime(NAME), _Copier(target, _newest(target))
        running = _copy_all(home, copier, lease)
        manifest = Manifest(
            name=name,
            versions=read_versions(home),
            running=running,
            left_out=copier.left_out | _not_reached(copier.files),
            files=tuple(copier.files.values()),
        )
        target.write(manifest)
        last = note_backup(home, manifest, target.url)
        record_action(home, _ACTION, "home", {**last, "seal": manifest.seal})
        removed = _prune(target, keep) if keep else ()
    return Backup(manifest=manifest, target=target.url, copied=copier.copied, removed=removed)


def _copy_all(home: Home, copier: _Copier, own: str) -> tuple[str, ...]:
    """Copy everything in order, but this process's ``own`` lease; return the experiments of active runs."""
    copier.add_tree(home.root, home.cache)
    with scratch_folder(home.work) as scratch:
        with startup_lock(home):  # or a run could begin between its lease and its database
            running = [each.experiment for each in held_leases(home)]
            running.remove(_ACTION)
            for lease in (each for each in home.leases.iterdir() if each.suffix in (".json", ".flow")):
                if lease.stem != own:
                    copier.add(f"leases/{lease.name}", lease)
            databases = [*_copy_embedded(home, scratch), *dump_databases(home, scratch)]
        for path, copy in databases:
            copier.add(path, copy)
    for entry in sorted(home.root.iterdir()):
        is_database = entry.name.startswith(_EMBEDDED[0])  # also its journals
        if not is_database and entry.suffix != ".lock" and entry.name not in (*_APART, *_NEVER):
            copier.add_tree(home.root, entry)
    for folder in (*home.checkpoints.glob("*/*"), *(path.parent for path in home.work.glob(f"*/{WORK_INPUTS}"))):
        copier.add_unit(home.root, folder)
    for folder in sorted(home.artifacts.glob("*/*")):  # garbage collection may remove one meanwhile
        copier.add_unit(home.root, folder, listed=_listed(folder))
    copier.add_tree(home.root, home.mlartifacts)
    served = services_folder(home.root)  # perhaps elsewhere, restored into the state directory
    copier.add_tree(served, served / "mlflow-artifacts", prefix="services/")
    return tuple(sorted(running))


class _Copier:
    """Files of a backup so far, and what its target has."""

    def __init__(self, target: BackupTarget, previous: Manifest | None) -> None:
        self._target, self._stored = target, target.contents()
        self._previous = {each.path: each for each in previous.files} if previous else {}
        self._linked: dict[tuple[int, int], str] = {}  # (device, inode) to the first path
        self.files: dict[str, BackupFile] = {}
        self.left_out: dict[str, str] = {}
        self.copied = 0

    def add_tree(self, root: Path, place: Path, *, prefix: str = "", listed: Mapping[str, str] | None = None) -> None:
        """Add a file, or all files of a folder; ``listed``: their digests as the artifact's manifest has them."""
        for path in (place,) if place.is_file() else sorted(place.rglob("*")):
            if _is_whole(path.relative_to(root)) and path.is_file():
                name = path.relative_to(place).as_posix()
                self.add(f"{prefix}{path.relative_to(root).as_posix()}", path, listed=(listed or {}).get(name, ""))

    def add_unit(self, root: Path, folder: Path, *, listed: Mapping[str, str] | None = None) -> None:
        """Add a folder as of one moment; leave it out if a run changes it all the time."""
        for _ in range(_TRIES):
            before, count = _stamps(folder), len(self.files)
            self.add_tree(root, folder, listed=listed)
            if _stamps(folder) == before:
                return
            for path in [*self.files][count:]:
                del self.files[path]
        name = folder.relative_to(root).as_posix()
        self.left_out = {path: why for path, why in self.left_out.items() if not path.startswith(f"{name}/")}
        self.left_out[name] = "a run was changing it"

    def add(self, path: str, source: Path, *, listed: str = "") -> None:
        """Add a file, unless it was added before; one that was removed meanwhile is no part of the backup."""
        if path in self.files:
            return
        try:
            for _ in range(_TRIES):
                before = source.stat()
                found = self._copy(path, source, before, listed)
                if _stamp(source.stat()) == _stamp(before):
                    break
                self.left_out[path] = "it was changed while it was copied"
            else:
                return
        except FileNotFoundError:
            return
        self.left_out.pop(path, None)
        if listed and found.sha256 != listed:
            self.left_out[path] = "damaged: not the file that its artifact had"
            return
        self.files[path] = found
        if before.st_nlink > 1:
            self._linked.setdefault((before.st_dev, before.st_ino), path)

    def _copy(self, path: str, source: Path, about: os.stat_result, listed: str) -> BackupFile:
        link = self._linked.get((about.st_dev, about.st_ino), "")
        link = link if link in self.files else ""  # or in a folder that was left out
        digest = self._known_digest(path, about, link, listed) or file_sha256(source)
        if self._stored.get(digest) != about.st_size and digest == (listed or digest):
            self._target.put(source, digest)
            self._stored[digest] = about.st_size
            self.copied += about.st_size
        return BackupFile(path=path, sha256=digest, bytes=about.st_size, modified=about.st_mtime_ns, link=link)

    def _known_digest(self, path: str, about: os.stat_result, link: str, listed: str) -> str:
        """Return the digest of a file that need not be read: unchanged since the previous backup, or stored."""
        known = self.files.get(link) or self._previous.get(path)
        is_same = known and (known.bytes, known.modified) == (about.st_size, about.st_mtime_ns)
        digest = known.sha256 if known and is_same else listed
        return digest if self._stored.get(digest) == about.st_size else ""


def _copy_embedded(home: Home, folder: Path) -> Iterator[tuple[str, Path]]:
    """Copy the embedded databases into a folder; yield their paths in the backup and there."""
    for path in (each for each in _EMBEDDED if (home.root / each).is_file()):
        copy = folder / Path(path).name
        copy_database(home.root / path, copy)
        yield path, copy


def _listed(artifact: Path) -> Mapping[str, str]:
    """Return the digests of an artifact's files by path; none if its manifest is damaged."""
    try:
        return listed_files(artifact / MANIFEST, artifact.name)
    except StorageError:
        return {}


def _is_whole(path: Path) -> bool:
    return not any(fnmatch(part, pattern) for part in path.parts for pattern in HALF_WRITTEN)


def _stamp(about: os.stat_result) -> tuple[int, int, int]:
    return about.st_size, about.st_mtime_ns, about.st_ino


def _stamps(folder: Path) -> dict[Path, tuple[int, int, int]]:
    found = {}
    for path in folder.rglob("*"):
        try:
            found[path] = _stamp(path.stat())
        except FileNotFoundError:
            continue
    return found


def _not_reached(paths: Mapping[str, BackupFile]) -> dict[str, str]:
    """Return the databases of external servers, of which the backup has no dump."""
    served = {name: os.environ.get(variable, "") for name, variable in _VARIABLES.items()}
    return {
        f"{DUMPS}/{name}.dump": f"the database of {url} is backed up where it runs"
        for name, url in served.items()
        if url.startswith("http") and f"{DUMPS}/{name}.dump" not in paths
    }


def _newest(target: BackupTarget) -> Manifest | None:
    """Return the newest backup, by which unchanged files are known; None if there is none, or it is damaged."""
    try:
        return target.read(target.names()[-1])
    except (IndexError, StorageError):
        return None


def _prune(target: BackupTarget, keep: int) -> tuple[str, ...]:
    """Remove all but the newest backups, and contents that none of these needs; return the removed names."""
    names = target.names()
    needed = {each.sha256 for name in names[-keep:] for each in target.read(name).files}
    target.remove(names[:-keep], target.contents().keys() - needed)
    return names[:-keep]


def describe(done: Backup) -> str:
    """Describe a backup in lines for a terminal."""
    manifest = done.manifest
    lines = [
        f"backup {manifest.name} in {done.target}: {len(manifest.files)} files, {_size(manifest.size)}; "
        f"{_size(done.copied)} were new",
        *(f"active meanwhile: {name}; stages that it finishes later are not in it" for name in manifest.running),
        *(f"not in it: {path}: {reason}" for path, reason in sorted(manifest.left_out.items())),
        *(f"removed: backup {name}" for name in done.removed),
    ]
    return "\n".join(lines) + "\n"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"

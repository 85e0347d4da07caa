"""Restore of a backup into an empty state directory.

A marker file precedes the first file and goes last. In between every other command refuses the state directory, and the
same restore continues. A damaged backup is refused as a whole.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rlcore.errors import ConfigError, StorageError
from rlcore.tasks.operations.backup_target import BackupFile, BackupTarget, Manifest, note_backup
from rlcore.tasks.operations.postgres import DUMPS, services_folder
from rlcore.tasks.store.artifacts import file_sha256
from rlcore.tasks.store.audit_log import record_action
from rlcore.tasks.store.disk import sync, to_storage_error
from rlcore.tasks.store.locks import folder_lock
from rlcore.tasks.store.settings import Home
from rlcore.tasks.store.state import UNFINISHED, require_known_formats
from rlcore.tasks.store.storage import link_or_copy, read_json, write_json
from rlcore.tasks.tracking.database import newest_version
from rlcore.tasks.tracking.relocate import rewrite_artifact_paths


@dataclass(frozen=True, kw_only=True)
class Restored:
    """Finished restore. ``model``: a registered version, the champion if there is one; empty if there is none."""

    manifest: Manifest
    target: str
    model: str


def restore(home: Home, url: str, name: str = "") -> Restored:
    """Restore a backup, by default the newest, and verify the digest of every file.

    Raises:
        ConfigError: the target cannot be opened, or has no such backup.
        StorageError: the state directory is not empty; the backup is damaged, incomplete or of another version.
    """
    target = BackupTarget(url)
    names = target.names()
    if not names or (name and name not in names):
        known = f"its backups: {', '.join(names)}" if names else "it has no backup"
        raise ConfigError(f"no backup {name} here: {known}" if name else known, where=target.url)
    manifest = target.read(name or names[-1])
    require_known_formats(manifest.versions, f"{target.url}, backup {manifest.name}")
    _refuse_damaged(manifest, _missing(target, manifest))
    home.root.mkdir(mode=0o700, parents=True, exist_ok=True)
    with folder_lock(home.root):
        _begin(home, manifest)
        if errors := [error for each in manifest.files for error in _bring(home, target, each)]:
            _clear(home)
            _refuse_damaged(manifest, errors)
        note_backup(home, manifest, target.url)
        rewrite_artifact_paths(home)
        record_action(home, "restore", "home", {"name": manifest.name, "seal": manifest.seal, "target": target.url})
        os.sync()  # every file before the marker goes, also in a power cut
        (home.root / UNFINISHED).unlink()
        sync(home.root)
    return Restored(manifest=manifest, target=target.url, model=newest_version(home.root / "mlflow.db"))


def _begin(home: Home, manifest: Manifest) -> None:
    """Mark an empty state directory, or continue the same restore.

    Raises:
        StorageError: it is not empty, or the restore of another backup has not ended.
    """
    marker, ours = home.root / UNFINISHED, {"name": manifest.name, "seal": manifest.seal}
    for left in home.root.glob(f".{UNFINISHED}.*.tmp"):  # of a restore that was killed before its first file
        left.unlink()
    begun = read_json(marker) if marker.exists() else None
    if begun is None and any(home.root.iterdir()):
        raise StorageError(
            "a backup is restored into an empty state directory only",
            where=str(home.root),
            fix="set RLCORE_HOME to a new folder",
        )
    if begun not in (None, ours):
        raise StorageError(
            f"the restore of another backup, {begun['name']}, was not finished here",
            where=str(home.root),
            fix=f"continue it with --at {begun['name']}, or empty the folder",
        )
    write_json(ours, marker)
    home.cache.mkdir(exist_ok=True)  # by which commands that only read notice a state directory


def _missing(target: BackupTarget, manifest: Manifest) -> list[str]:
    stored = target.contents()
    return [f"{each.path} is missing" for each in manifest.files if stored.get(each.sha256) != each.bytes]


def _bring(home: Home, target: BackupTarget, file: BackupFile) -> Iterator[str]:
    """Write one file unless a killed restore did; yield the error of a damaged one."""
    path = _place(home, file.path)
    aside = path.with_name(f".{path.name}.tmp")
    try:
        if path.exists() and file_sha256(path) == file.sha256:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        aside.unlink(missing_ok=True)
        if file.link:
            link_or_copy(_place(home, file.link), aside)
        elif not target.get(file.sha256, aside):
            yield f"{file.path} is missing"
            return
        else:
            os.utime(aside, ns=(file.modified, file.modified))  # by which the next backup knows the file
        if file_sha256(aside) != file.sha256:
            yield f"{file.path} is damaged"
        aside.replace(path)
    except OSError as error:
        raise to_storage_error("write", path, error) from error


def _place(home: Home, path: str) -> Path:
    """Return the place of a file; the services' folder may be outside of the state directory."""
    head, _, rest = path.partition("/")
    return services_folder(home.root) / rest if head == "services" else home.root / path


def _clear(home: Home) -> None:
    """Empty the state directory, the marker last."""
    for entry in [each for each in home.root.iterdir() if each.name != UNFINISHED]:
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    (home.root / UNFINISHED).unlink()


def _refuse_damaged(manifest: Manifest, errors: list[str]) -> None:
    if errors:
        raise StorageError(
            f"the backup {manifest.name} is damaged, and nothing was restored:\n  " + "\n  ".join(errors),
            fix="restore another one: --at NAME; if the original still exists, remove these contents and back it up",
        )


def describe(home: Home, done: Restored) -> str:
    """Describe a restore, and how to prove it, in lines for a terminal."""
    manifest = done.manifest
    has_dumps = any(each.path.startswith(f"{DUMPS}/") for each in manifest.files)
    lines = [
        f"restored {manifest.name} of {done.target} to {home.root}: {len(manifest.files)} files, every digest is right",
        *(f"not in it: {path}: {reason}" for path, reason in sorted(manifest.left_out.items())),
        f"prove it: rlcore reproduce {done.model}" if done.model else "",
        f"servers:  `make services` loads the databases in {DUMPS}/ and draws new passwords" if has_dumps else "",
    ]
    return "\n".join(filter(None, lines)) + "\n"

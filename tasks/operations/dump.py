"""Dumps of the databases of a state directory, consistent while runs are active, and their restore.

A dump is a folder with copies of the embedded databases, ``pg_dump``'s files of the services' ones, and ``SHA256SUMS``.
Any tool can then back up the state directory but for the files that ``dumps/exclude`` names.
"""

from __future__ import annotations

import glob
import os
import shutil
import sqlite3
from datetime import UTC, datetime
from pathlib import Path

from rlcore.errors import StorageError
from rlcore.tasks.operations.postgres import dump_databases, services_folder
from rlcore.tasks.store.audit_log import record_action
from rlcore.tasks.store.locks import folder_lock, is_held, scratch_folder
from rlcore.tasks.store.settings import Home
from rlcore.tasks.store.state import DUMPS, EMBEDDED, copy_database, gone_databases, has_database, newest_dump
from rlcore.tasks.store.storage import file_sha256, sync, write_bytes

_KEPT = 7  # dumps
_SUMS = "SHA256SUMS"
_SERVERS = {"mlflow": "MLFLOW_TRACKING_URI", "prefect": "PREFECT_API_URL"}


def make_dump(home: Home) -> str:
    """Dump all databases, remove all but the newest dumps, and describe the dump in lines for a terminal.

    Raises:
        StorageError: there is no database, or one of the last dump is gone.
        ServiceError: the services' databases cannot be read.
    """
    place, last = home.root / DUMPS, newest_dump(home.root)
    with scratch_folder(home.work) as scratch:
        dump = scratch / f"{datetime.now(UTC):%Y%m%dT%H%M%S%fZ}"
        dump.mkdir()
        for name, live in EMBEDDED.items():
            if has_database(home.root / live):
                _copy(home.root / live, dump / name)
        dump_databases(home.root, dump)
        sums = _sums(dump)
        if not sums or (last and {path.name for path in last.iterdir()} - {_SUMS, *sums}):
            raise StorageError(
                f"the dump {last.name} has a database that is not here now" if last else "there is no database to dump",
                where=str(home.root),
                fix=f"bring the database back, or remove the folder {DUMPS} if it is not needed any more",
            )
        (dump / _SUMS).write_text("".join(f"{digest}  {name}\n" for name, digest in sums.items()), encoding="utf-8")
        for path in (*dump.iterdir(), dump):
            sync(path)
        place.mkdir(mode=0o700, exist_ok=True)
        write_bytes("".join(f"{line}\n" for line in _live(home.root)).encode(), place / "exclude")
        dump.rename(place / dump.name)
        sync(place)
    for old in sorted(place.glob("[0-9]*"))[:-_KEPT]:
        shutil.rmtree(old, ignore_errors=True)
    servers = [(name, os.environ.get(variable, "")) for name, variable in _SERVERS.items()]
    elsewhere = [url for name, url in servers if url.startswith("http") and f"{name}.dump" not in sums]
    left_out = (f"not in it: the database of {url}\n" for url in elsewhere)
    return f"dump {place / dump.name}: {', '.join(sums)}\n" + "".join(left_out)


def restore_dump(home: Home) -> str:
    """Put the newest dump in the place of the embedded databases that are gone; describe it in lines for a terminal.

    Raises:
        StorageError: there is no dump, it is damaged, a run is active, or no database is gone.
    """
    dump = newest_dump(home.root)
    if dump is None:
        raise StorageError("there is no dump", where=str(home.root / DUMPS), fix="restore the state directory first")
    with folder_lock(home.root):
        if any(map(is_held, home.leases.glob("*.json"))):
            raise StorageError("a run is active here", where=str(home.leases), fix="wait until it has ended")
        _require_whole(dump)
        served, gone = [path.name for path in dump.glob("*.dump")], gone_databases(home.root)
        if not gone and not served:
            fix = "move the database away that the dump shall replace"
            raise StorageError("every database is here, and a dump replaces none", where=str(home.root), fix=fix)
        record_action(home, "restore", "home", {"dump": dump.name})
        for live, copy in gone.items():
            _place(home, copy, live)
    lines = [f"restored {live} from {copy}" for live, copy in gone.items()]
    lines += [f"`make services` loads {', '.join(sorted(served))} and draws new passwords"] if served else []
    return "\n".join([*lines, "prove it: rlcore reproduce NAME/VERSION"]) + "\n"


def _copy(live: Path, copy: Path) -> None:
    try:
        copy_database(live, copy)
    except sqlite3.Error as error:
        raise StorageError(f"not dumped: {error}", where=str(live), fix="restore it from an earlier dump") from error


def _place(home: Home, copy: Path, live: Path) -> None:
    live.parent.mkdir(mode=0o700, exist_ok=True)
    for left in live.parent.glob(f"{live.name}-*"):  # a log of changes to the lost database
        left.unlink()
    with scratch_folder(home.work) as scratch:
        copy_database(copy, scratch / live.name)
        (scratch / live.name).replace(live)
    sync(live.parent)


def _sums(dump: Path) -> dict[str, str]:
    return {path.name: file_sha256(path) for path in sorted(dump.iterdir()) if path.name != _SUMS}


def _require_whole(dump: Path) -> None:
    listed = dump / _SUMS
    lines = listed.read_text(encoding="utf-8").splitlines() if listed.is_file() else []
    wanted = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    found = _sums(dump)
    if wrong := sorted(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name)):
        fix = f"restore it again; or remove {dump}, and the one before is taken"
        raise StorageError(f"the dump is damaged: {', '.join(wrong)}", where=str(dump), fix=fix)


def _live(root: Path) -> tuple[str, ...]:
    """Return the patterns of what a copy of files must leave out: live databases and passwords."""
    services, own = glob.escape(str(services_folder(root))), glob.escape(str(root))
    return f"{own}/mlflow.db*", f"{own}/prefect", f"{services}/*", f"!{services}/mlflow-artifacts"

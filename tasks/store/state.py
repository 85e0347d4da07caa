"""Databases of a state directory: versions that wrote them, their upgrade, and what is left of a lost one.

Newer state is refused. An older database is copied and upgraded on demand (:func:`upgrade`), by the migrations of
MLflow and Prefect, because no older version opens it afterwards. Cache records of an older format count as absent. The
file ``versions.json`` records the writers. The folder ``dumps`` has a folder for each dump, named by time.
"""

from __future__ import annotations

import json
import os
import re
import sqlite3
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcore.errors import StorageError
from rlcore.tasks.store.cache import RECORD_FORMAT
from rlcore.tasks.store.locks import folder_lock, is_held
from rlcore.tasks.store.storage import sync, write_json

if TYPE_CHECKING:
    from rlcore.tasks.store.settings import Home


DUMPS = "dumps"
EMBEDDED = {"mlflow.sqlite": "mlflow.db", "prefect.sqlite": "prefect/prefect.db"}
"""Names of copies in a dump, and the databases in the state directory."""
_NOTE, _FORMAT = "versions.json", "records"
_SECONDS = 60.0  # seconds to wait for another process that writes a database
_REVISION = re.compile(r"^(down_)?revision(?:\s*:[^=\n]+)?\s*=\s*(.+)$", re.MULTILINE)
_QUOTED = re.compile(r"""["']([^"']+)["']""")


@dataclass(frozen=True, kw_only=True)
class Database:
    """Database of a tool. ``migrations``: below the tool's package; ``command`` upgrades it to the schema."""

    tool: str
    path: Path
    migrations: str
    command: Sequence[str]

    @property
    def installed(self) -> str:
        return metadata.version(self.tool)

    @property
    def schema(self) -> str:
        """Return the schema of the database; empty if it does not exist yet."""
        if not self.path.is_file():
            return ""
        with closing(sqlite3.connect(f"{self.path.as_uri()}?mode=ro", uri=True)) as database:
            try:
                row = database.execute("SELECT version_num FROM alembic_version").fetchone()
            except sqlite3.OperationalError:  # no table yet: it is being made
                return ""
            except sqlite3.DatabaseError as error:
                raise StorageError(
                    f"not a database: {error}", where=str(self.path), fix="restore it from a backup"
                ) from error
        return str(row[0]) if row else ""

    def schemas(self) -> tuple[frozenset[str], frozenset[str]]:
        """Return the schemas that the installed version knows, and the newest of them."""
        spec = find_spec(self.tool)
        folders = spec.submodule_search_locations if spec else None
        known, followed = set[str](), set[str]()
        for path in (Path(folder) / self.migrations for folder in folders or ()):
            for script in path.glob("*.py"):
                for is_before, names in _REVISION.findall(script.read_text(encoding="utf-8")):
                    (followed if is_before else known).update(_QUOTED.findall(names))
        return frozenset(known), frozenset(known - followed)


def require_readable(home: Home) -> None:
    """Record the installed versions as writers, unless the existing state needs other versions.

    Raises:
        StorageError: a newer version wrote it, or a database needs an upgrade.
    """
    note = home.root / _NOTE
    known = read_versions(home)
    require_known_formats(known, home.root)
    found, older = {**known, _FORMAT: RECORD_FORMAT}, list[Database]()
    for each in databases(home):
        before = known.get(each.tool, {})
        found[each.tool] = {"version": each.installed, "schema": each.schema}
        if found[each.tool] != before and each.schema and _needs_upgrade(each, before):
            older.append(each)
    if older:
        names = ", ".join(f"{each.path.name} ({each.tool} {each.installed})" for each in older)
        raise StorageError(
            f"the state directory's databases have an older schema: {names}",
            where=str(home.root),
            fix="run `rlcore upgrade`, which copies them first; or install the versions again that wrote them",
        )
    if found != known:
        with folder_lock(home.root):
            for left in home.root.glob(f".{_NOTE}.*.tmp"):  # by a process that was killed here, before it had a lease
                left.unlink()
            write_json(found, note)


def require_known_formats(versions: Mapping[str, Any], where: object) -> None:
    """Refuse files that a newer rlcore wrote.

    Raises:
        StorageError: names the format there and here.
    """
    found = versions.get(_FORMAT, RECORD_FORMAT)  # the first versions noted none
    if not isinstance(found, int) or found > RECORD_FORMAT:
        raise StorageError(
            f"the state directory was written by a newer rlcore (format {found!r}, this one knows {RECORD_FORMAT})",
            where=str(where),
            fix="install that version again, or set RLCORE_HOME to another folder",
        )


def databases(home: Home) -> tuple[Database, ...]:
    """Return the databases in the state directory that this process uses."""
    mlflow = Database(
        tool="mlflow",
        path=home.root / "mlflow.db",
        migrations="store/db_migrations/versions",
        command=("db", "upgrade", home.tracking_uri),
    )
    prefect = Database(
        tool="prefect",
        path=home.prefect / "prefect.db",
        migrations="server/database/_migrations/versions/sqlite",
        command=("server", "database", "upgrade", "-y"),
    )
    is_embedded = os.environ.get("MLFLOW_TRACKING_URI", home.tracking_uri) == home.tracking_uri
    is_asked = os.environ.get("RLCORE_ENGINE") != "inline" and not os.environ.get("PREFECT_API_URL")
    return (mlflow,) * is_embedded + (prefect,) * is_asked


def upgrade(home: Home) -> tuple[str, ...]:
    """Upgrade the databases to the installed versions, each after a copy; return a line for each older one.

    No process may use the state directory meanwhile.
    Raises:
        StorageError: a run is active, a newer version wrote a database, or its upgrade failed and was undone.
    """
    if any(map(is_held, home.leases.glob("*.json"))):
        raise StorageError("a run is active here", where=str(home.leases), fix="wait until it has ended")
    known, lines = read_versions(home), []
    require_known_formats(known, home.root)
    for each in databases(home):
        before = each.schema
        if before and _needs_upgrade(each, known.get(each.tool, {})):
            copy = home.root / "backups" / f"{each.path.stem}-{before}.db"
            copy.parent.mkdir(exist_ok=True)
            copy_database(each.path, copy)
            done = subprocess.run(
                [sys.executable, "-m", each.tool, *each.command], capture_output=True, text=True, check=False
            )
            if done.returncode or _needs_upgrade(each, {}):
                copy_database(copy, each.path)
                last = (done.stderr or done.stdout).strip().rpartition("\n")[2]
                raise StorageError(
                    f"{each.tool} could not upgrade its database, which is unchanged: {last}",
                    where=str(each.path),
                    fix="install the version again that wrote it",
                )
            lines.append(f"{each.path.name}: now of {each.tool} {each.installed}; as it was: {copy}")
    require_readable(home)
    return tuple(lines)


def read_versions(home: Home) -> dict[str, Any]:
    """Return the recorded versions; empty if the record is damaged, so that the databases are checked."""
    try:
        known = json.loads((home.root / _NOTE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _needs_upgrade(each: Database, before: Mapping[str, str]) -> bool:
    """Return True if another version than the installed one wrote the database, with an older schema.

    A partial schema of the installed version is no reason: that process was killed while it made the tables.
    """
    known, newest = each.schemas()
    if each.schema not in known:
        other = f", {before['version']}" if before.get("version", each.installed) != each.installed else ""
        raise StorageError(
            f"the database was written by a newer {each.tool}{other}; {each.installed} is installed and cannot read it",
            where=str(each.path),
            fix=f"install that version of {each.tool} again, or restore a copy from its folder backups",
        )
    return each.schema not in newest and before.get("version") != each.installed


def copy_database(source: Path, target: Path) -> None:
    """Copy a database consistently, including changes that are still in its write-ahead log."""
    with closing(sqlite3.connect(source, timeout=_SECONDS)) as read, closing(sqlite3.connect(target)) as write:
        read.backup(write)
    sync(target)


def newest_dump(root: Path) -> Path | None:
    """Return the folder of the newest dump; None if there is none."""
    return max((root / DUMPS).glob("[0-9]*"), default=None)


def has_database(path: Path) -> bool:
    """Return True if a database is there: a file for the first one is made empty."""
    return path.is_file() and path.stat().st_size > 0


def gone_databases(root: Path) -> dict[Path, Path]:
    """Return the databases that are gone, each with its copy in the newest dump."""
    dump = newest_dump(root)
    pairs = [(root / live, dump / name) for name, live in EMBEDDED.items()] if dump else []
    return {live: copy for live, copy in pairs if copy.is_file() and not has_database(live)}


def require_databases(root: Path) -> None:
    """Refuse a state directory that has lost a database, or is restored without one: an empty one would replace it.

    Raises:
        StorageError: names the dump.
    """
    for live, copy in gone_databases(root).items():
        raise StorageError(
            f"the database is gone; the newest dump of it is {copy.relative_to(root)}",
            where=str(live),
            fix=f"take it: rlcore dump --restore; or remove the folder {DUMPS} to begin with an empty database",
        )

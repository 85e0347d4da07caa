"""Embedded MLflow database: created atomically, read without MLflow, and moved with its state directory.

MLflow stores absolute paths of files. Each experiment keeps its files in ``<home>/mlartifacts/<experiment>``, and the
locations of its runs and models begin with that path. If the path is not in this state directory, it was moved or
copied, and one transaction rewrites the locations before they are read. A copy thus uses only its own files.
"""

from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import Collection, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from rlcore.errors import StorageError
from rlcore.tasks.store.passwords import private_file
from rlcore.tasks.store.settings import Home
from rlcore.tasks.store.storage import sync

logger = logging.getLogger(__name__)
_SQLITE = "sqlite:///"
_SECONDS = 60.0  # seconds to wait for another process that writes
_FOLDER = "/mlartifacts/"
_PLACES = (  # the columns of MLflow's tables with file locations
    ("experiments", "artifact_location"),
    ("runs", "artifact_uri"),
    ("logged_models", "artifact_location"),
    ("model_versions", "storage_location"),
    ("model_versions", "source"),
    ("trace_tags", "value"),
)
# MLflow creates it, for files below the folder in which the database was first opened.
_EMPTY_DEFAULT = """
    SELECT artifact_location FROM experiments WHERE experiment_id = 0
    AND NOT EXISTS (SELECT 1 FROM runs WHERE experiment_id = 0)
    AND NOT EXISTS (SELECT 1 FROM logged_models WHERE experiment_id = 0)
"""


@dataclass(frozen=True, kw_only=True)
class StoredVersion:
    """Registered version: the digest of its artifact, empty if rlcore did not register it, and its aliases as text."""

    name: str
    version: int
    sha256: str
    aliases: str


def database_of(home: Home) -> Path | None:
    """Return the file of MLflow's database, or None if a server has it."""
    uri = os.environ.get("MLFLOW_TRACKING_URI") or home.tracking_uri
    return Path(uri.removeprefix(_SQLITE)) if uri.startswith(_SQLITE) else None


def require_made(home: Home) -> None:
    """Refuse a state directory that does not exist.

    Raises:
        StorageError: it does not exist.
    """
    if not home.root.is_dir():
        raise StorageError(
            "nothing was run here yet", where=str(home.root), fix="set RLCORE_HOME to the state directory of the runs"
        )


def make_database(home: Home) -> None:
    """Create the state directory's database, if there is none, in a file that is then renamed.

    Sixty migrations create the tables, each in its own transaction. A kill between two of them would leave a database
    that MLflow always rejects; here it leaves a file that the next start removes. The caller holds MLflow's lock.
    """
    path = home.root / "mlflow.db"
    if path.exists():
        return
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    logging.getLogger("alembic").setLevel(logging.WARNING)  # each migration is logged
    aside = path.with_name(f".{path.name}.new")
    for remains in home.root.glob(f"{aside.name}*"):  # SQLite's journal is next to its file
        remains.unlink()
    private_file(aside)
    store = SqlAlchemyStore(f"sqlite:///{aside}", home.mlartifacts.as_uri())  # type: ignore[no-untyped-call]
    store.engine.dispose()
    sync(aside)
    aside.rename(path)
    sync(home.root)


def database_rows(path: Path, query: str, *values: object) -> list[Any]:
    """Return what a query finds in MLflow's database, read without MLflow."""
    with closing(sqlite3.connect(path.as_uri() + "?mode=ro", uri=True)) as database:
        return database.execute(query, values).fetchall()


def stored_versions(path: Path, names: Collection[str]) -> list[StoredVersion]:
    """Return all versions of registered models, read without MLflow."""
    if not path.is_file():
        return []
    query = """
        SELECT name, version,
            (SELECT value FROM model_version_tags t WHERE (t.name, t.version, t.key) = (v.name, v.version, 'sha256')),
            (SELECT group_concat(alias, ', ') FROM registered_model_aliases a
                WHERE (a.name, a.version) = (v.name, v.version))
        FROM model_versions v WHERE current_stage NOT LIKE 'Deleted%' ORDER BY name, version"""
    return [
        StoredVersion(name=name, version=version, sha256=sha256 or "", aliases=aliases or "")
        for name, version, sha256, aliases in database_rows(path, query)
        if name in names
    ]


def deleted_runs(path: Path) -> set[str]:
    """Return the runs that a user deleted, read without MLflow."""
    return {run for (run,) in database_rows(path, "SELECT run_uuid FROM runs WHERE lifecycle_stage = 'deleted'")}


def stored_version(path: Path, name: str, *, alias: str, number: str) -> dict[str, str] | None:
    """Return number and tags of a registered version, read without MLflow; None if there is none."""
    if not path.is_file():
        return None
    by_alias = "SELECT version FROM registered_model_aliases WHERE name = ? AND alias = ?"
    numbered = "name = ? AND version = ?"
    by_number = f"SELECT version FROM model_versions WHERE {numbered} AND current_stage NOT LIKE 'Deleted%'"
    found = database_rows(path, by_alias if alias else by_number, name, alias or number)
    if not found:
        return None
    version = found[0][0]
    tags = database_rows(path, f"SELECT key, value FROM model_version_tags WHERE {numbered}", name, version)
    return {"version": str(version), **dict(tags)}


def rewrite_artifact_paths(home: Home) -> int:
    """Rewrite the file locations in the embedded database to this state directory; return their number."""
    path = home.root / "mlflow.db"
    if not path.is_file():
        return 0
    with closing(sqlite3.connect(path, timeout=_SECONDS, isolation_level=None)) as database:
        if not _moves(database, home):
            return 0
        database.execute("BEGIN IMMEDIATE")
        moves = _moves(database, home)  # checked again: another process may have rewritten them
        count = sum(_rewrite(database, old, new) for old, new in moves.items())
        database.execute("COMMIT")
    # A new database has one location, of MLflow's default experiment: nothing was moved.
    if count > 1:
        logger.info("state directory was moved or copied: rewrote %d file locations in MLflow to %s", count, home.root)
    return count


def _moves(database: sqlite3.Connection, home: Home) -> Mapping[str, str]:
    if not _has(database, "experiments", "artifact_location"):
        return {}
    root = home.mlartifacts.as_uri()
    query = "SELECT experiment_id, name, artifact_location FROM experiments"
    found = {}
    for number, name, location in database.execute(query):
        head, _, rest = (location or "").rpartition(_FOLDER)
        is_ours = unquote(rest) in (name, str(number)) or (home.mlartifacts / unquote(rest)).is_dir()
        if head and is_ours and location != f"{root}/{rest}":
            found[location] = f"{root}/{rest}"
    default = database.execute(_EMPTY_DEFAULT).fetchone()
    if default and default[0] != f"{root}/0":
        found[default[0]] = f"{root}/0"
    return found


def _rewrite(database: sqlite3.Connection, old: str, new: str) -> int:
    count = 0
    for table, column in _PLACES:
        if _has(database, table, column):
            statement = (
                f"UPDATE {table} SET {column} = ? || substr({column}, ?) "
                f"WHERE {column} = ? OR substr({column}, 1, ?) = ?"
            )
            values = (new, len(old) + 1, old, len(old) + 1, f"{old}/")
            count += database.execute(statement, values).rowcount
    return count


def _has(database: sqlite3.Connection, table: str, column: str) -> bool:
    return column in {row[1] for row in database.execute(f"PRAGMA table_info({table})")}

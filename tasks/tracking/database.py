"""Embedded MLflow database: created atomically, and read without MLflow."""

from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import Collection
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from rlcore.errors import StorageError
from rlcore.tasks.store.disk import sync
from rlcore.tasks.store.passwords import private_file
from rlcore.tasks.store.settings import Home

_SQLITE = "sqlite:///"


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
    """Refuse a state directory that does not exist, as for a command that only reads.

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
    with closing(sqlite3.connect(path.as_uri() + "?mode=ro", uri=True)) as database:
        rows = database.execute(query).fetchall()
    return [
        StoredVersion(name=name, version=version, sha256=sha256 or "", aliases=aliases or "")
        for name, version, sha256, aliases in rows
        if name in names
    ]


def deleted_runs(path: Path) -> set[str]:
    """Return the runs that a user deleted, read without MLflow."""
    with closing(sqlite3.connect(path.as_uri() + "?mode=ro", uri=True)) as database:
        rows = database.execute("SELECT run_uuid FROM runs WHERE lifecycle_stage = 'deleted'").fetchall()
    return {run for (run,) in rows}


def stored_version(path: Path, name: str, *, alias: str, number: str) -> dict[str, str] | None:
    """Return number and tags of a registered version, read without MLflow; None if there is none."""
    if not path.is_file():
        return None
    by_alias = "SELECT version FROM registered_model_aliases WHERE name = ? AND alias = ?"
    numbered = "name = ? AND version = ?"
    by_number = f"SELECT version FROM model_versions WHERE {numbered} AND current_stage NOT LIKE 'Deleted%'"
    with closing(sqlite3.connect(path.as_uri() + "?mode=ro", uri=True)) as database:
        row = database.execute(by_alias if alias else by_number, (name, alias or number)).fetchone()
        if row is None:
            return None
        query = f"SELECT key, value FROM model_version_tags WHERE {numbered}"
        return {"version": str(row[0]), **dict(database.execute(query, (name, row[0])).fetchall())}

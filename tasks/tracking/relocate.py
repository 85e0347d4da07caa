"""Relocation of a state directory: MLflow's embedded database stores absolute paths of files.

Each experiment keeps its files in ``<home>/mlartifacts/<experiment>``, and the locations of its runs and models begin
with that path. If the path is not in this state directory, it was moved or copied, and one transaction rewrites the
locations before they are read. A copy thus uses only its own files.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from urllib.parse import unquote

from rlcore.tasks.store.settings import Home

logger = logging.getLogger(__name__)

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


def rewrite_artifact_paths(home: Home) -> int:
    """Rewrite the file locations in the embedded database to this state directory; return their number.

    The rewrite is atomic. Nothing is written if the state directory was not moved.
    """
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
    """Return the experiment folders of other locations, each with its folder in this state directory."""
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

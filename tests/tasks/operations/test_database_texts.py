"""Cells that quote a row are redacted in any table, and no page of the file keeps an older copy."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from rlcore.errors import ServiceError
from rlcore.tasks.operations.database_texts import count_quotes, open_databases, redact
from rlcore.tasks.operations.quotes import REDACTED, quotes_of
from rlcore.tasks.store.settings import Home

TEXT = "Zyxwyr Quennell of 17 Larch Road asks for a loan"
QUOTES = quotes_of([TEXT])


@pytest.fixture
def home(tmp_path: Path) -> Home:
    """A database in the mode of Prefect's, with a deleted row, a live one, and others."""
    (tmp_path / "prefect").mkdir()
    with closing(sqlite3.connect(tmp_path / "prefect" / "prefect.db")) as database:
        database.execute("PRAGMA journal_mode=WAL")
        database.execute("CREATE TABLE log (id CHAR(36) PRIMARY KEY, message TEXT, level SMALLINT)")
        database.execute("CREATE TABLE events (id CHAR(36) PRIMARY KEY, payload JSON, occurred DATETIME)")
        database.execute("CREATE TABLE unkeyed (name VARCHAR(20), value VARCHAR)")
        database.executemany(
            "INSERT INTO log VALUES (?, ?, 20)", [("a", f"failed: {TEXT}"), ("b", "done"), ("c", TEXT)]
        )
        payload = json.dumps({"text": TEXT, "run": "tiny"})
        database.execute("INSERT INTO events VALUES ('e', ?, '2026-01-01 00:00:00')", (payload,))
        database.executemany("INSERT INTO unkeyed VALUES (?, ?)", [("seed", "0"), ("error", TEXT)])
        database.commit()
        database.execute("DELETE FROM log WHERE id = 'c'")
        database.commit()
    return Home(tmp_path)


def _rows(home: Home, query: str) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(home.root / "prefect" / "prefect.db")) as database:
        return database.execute(query).fetchall()


def test_quotes_are_counted_by_column_and_then_gone_from_every_byte(home: Home) -> None:
    ((name, engine),) = open_databases(home)
    assert name == "prefect/prefect.db"
    assert count_quotes(engine, QUOTES) == {"log.message": 1, "events.payload": 1, "unkeyed.value": 1}
    redact(engine, QUOTES)
    assert count_quotes(engine, QUOTES) == {}
    files = [*home.prefect.iterdir()]
    assert [path.name for path in files if b"Quennell" in path.read_bytes()] == []


def test_everything_else_stays(home: Home) -> None:
    ((_, engine),) = open_databases(home)
    redact(engine, QUOTES)
    assert _rows(home, "SELECT * FROM log ORDER BY id") == [("a", REDACTED, 20), ("b", "done", 20)]
    ((identity, payload, occurred),) = _rows(home, "SELECT * FROM events")
    assert (identity, occurred) == ("e", "2026-01-01 00:00:00")
    assert json.loads(str(payload)) == {"text": REDACTED, "run": "tiny"}
    assert _rows(home, "SELECT value FROM unkeyed WHERE name = 'seed'") == [("0",)]


def test_a_database_of_the_services_that_cannot_be_searched_ends_the_search(home: Home) -> None:
    folder = home.root / "services"
    folder.mkdir()
    (folder / "passwords.json").write_text('{"mlflow": "secret", "prefect": "secret"}')
    (folder / "layout.json").write_text('{"ports": {"postgres": 1}}')
    with pytest.raises(ServiceError, match="the database mlflow of the services cannot be searched"):
        list(open_databases(home))

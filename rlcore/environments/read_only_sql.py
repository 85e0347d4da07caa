"""Read-only SQLite database for a policy's SQL.

    database = ReadOnlyDatabase({"stock": (("id", "price"), [(481, 57), (482, 12)])})
    database.answer("SELECT price FROM stock WHERE id=481")    # "57"

The file is read-only and unlinked. SQLite's authorizer allows a query to read the database's tables and to call
deterministic functions: no ATTACH, PRAGMA, writes, transactions, extensions and clocks. Work is limited in steps of
SQLite's virtual machine, not in seconds, so that every machine gives the same answer.
"""

from __future__ import annotations

import re
import sqlite3
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlcore.environments.base import CallError

Table = tuple[Sequence[str], Sequence[Sequence[int | float | str | None]]]

MORE = "[more rows]"  # follows the last row if rows are omitted
_STEPS_AT_ONCE = 1_000
_SELECT = re.compile(r"\bselect\b", re.IGNORECASE)
# Excluded are functions that make long values, that take longer than one step, random ones, and clocks.
_PLAIN = "abs coalesce ifnull length like lower nullif round substr substring upper"
_OVER_ROWS = "avg count max min row_number sum total"
_FUNCTIONS = frozenset((*_PLAIN.split(), *_OVER_ROWS.split()))
_SCHEMA = ("sqlite_master", "sqlite_schema")


@dataclass(frozen=True, kw_only=True, slots=True)
class SqlLimits:
    """Limits of a query.

    Attributes:
        steps: Maximum steps of SQLite's virtual machine.
        row_bytes: Maximum size of a row.
        characters: Maximum length of the query.
        selects: Maximum number of SELECTs. A repeated subquery is compiled repeatedly, and compiling counts no steps,
            so a few nested subqueries could use all memory.
    """

    rows: int = 20
    steps: int = 50_000
    row_bytes: int = 1_000
    characters: int = 500
    selects: int = 3


class ReadOnlyDatabase:
    """Database of ``tables``, each with columns and rows. Close it at the end of the episode."""

    def __init__(self, tables: Mapping[str, Table], limits: SqlLimits | None = None) -> None:
        self._limits = limits or SqlLimits()
        self._connection = _opened(tables)
        self._connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, self._limits.row_bytes)
        self._connection.setlimit(sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH, 50)
        self._connection.set_authorizer(_authorizer(frozenset((*tables, *_SCHEMA))))

    def answer(self, query: str) -> str:
        """Return the rows of a query, one per line.

        Raises:
            CallError: The query is malformed, refused, or exceeds its limits.
        """
        if len(query) > self._limits.characters:
            raise CallError(f"a query has at most {self._limits.characters} characters")
        if len(_SELECT.findall(query)) > self._limits.selects:
            raise CallError(f"a query has at most {self._limits.selects} SELECTs")
        budget = iter(range(self._limits.steps // _STEPS_AT_ONCE))
        self._connection.set_progress_handler(lambda: next(budget, None) is None, _STEPS_AT_ONCE)
        try:
            cursor = self._connection.execute(query)
            rows = cursor.fetchmany(self._limits.rows + 1)
            cursor.close()
        except (sqlite3.Error, sqlite3.Warning, UnicodeError) as error:  # Warning: several statements
            is_late = str(error) == "interrupted"
            raise CallError("the query takes too many steps" if is_late else str(error)) from None
        shown = [" | ".join(map(_written, row)) for row in rows[: self._limits.rows]]
        return "\n".join([*shown, MORE] if len(rows) > len(shown) else shown) or "no rows"

    def close(self) -> None:
        self._connection.close()


def _opened(tables: Mapping[str, Table]) -> sqlite3.Connection:
    made = sqlite3.connect(":memory:")
    for name, (columns, rows) in tables.items():
        made.execute(f'CREATE TABLE "{name}" ({", ".join(columns)})')
        made.executemany(f'INSERT INTO "{name}" VALUES ({", ".join("?" * len(columns))})', rows)
    made.commit()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "database.sqlite"
        path.write_bytes(made.serialize())
        made.close()
        # Calls of one episode are sequential, but may come from different threads.
        uri = f"{path.as_uri()}?mode=ro&immutable=1"
        connection = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False)
        connection.execute("PRAGMA temp_store = MEMORY")  # no temporary files for sorting
        # SQLite opens the file at the first query; then it can be unlinked.
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    return connection


def _authorizer(tables: frozenset[str]) -> Callable[..., int]:
    def is_allowed(action: int, first: str | None, second: str | None, *_: str | None) -> int:
        allowed = (
            action in (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_RECURSIVE)
            or (action == sqlite3.SQLITE_READ and (first in tables or second == ""))  # "": no column, as in count(*)
            or (action == sqlite3.SQLITE_FUNCTION and second in _FUNCTIONS)
        )
        return sqlite3.SQLITE_OK if allowed else sqlite3.SQLITE_DENY

    return is_allowed


def _written(value: int | float | str | bytes | None) -> str:
    return "NULL" if value is None else value.hex() if isinstance(value, bytes) else str(value)

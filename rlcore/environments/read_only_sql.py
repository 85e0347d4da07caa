"""SQL that a policy wrote, against a small SQLite database that it can only read.

    database = ReadOnlyDatabase({"stock": (("id", "price"), [(481, 57), (482, 12)])})
    database.answer("SELECT price FROM stock WHERE id=481")    # "57"

The file is opened with ``mode=ro`` and has no name any more: nothing can be written to it, and nothing is left of it.
SQLite's authorizer lets a query read the database's own tables, and call functions that always say the same. It refuses
ATTACH, PRAGMA, writes, transactions, extensions and clocks. Work is counted in steps of SQLite's machine and not in
seconds, so that a query has the same answer on every machine and after every resume.
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

MORE = "[more rows]"  # stands after the last row that is shown, where there are others
_STEPS_AT_ONCE = 1_000
_SELECT = re.compile(r"\bselect\b", re.IGNORECASE)
# Not among them: what makes long values of short ones, what takes longer than one step says, what draws, what tells the
# time.
_PLAIN = "abs coalesce ifnull length like lower nullif round substr substring upper"
_OVER_ROWS = "avg count max min row_number sum total"
_FUNCTIONS = frozenset((*_PLAIN.split(), *_OVER_ROWS.split()))
_SCHEMA = ("sqlite_master", "sqlite_schema")


@dataclass(frozen=True, kw_only=True, slots=True)
class SqlLimits:
    """What a query may take. ``rows``: that are shown; ``row_bytes``: of a row; ``steps``: of SQLite's machine.

    ``characters`` and ``selects`` are those of the query. A subquery that is named twice is compiled twice, and nothing
    counts steps while SQLite compiles: a few subqueries that name each other would take all memory.
    """

    rows: int = 20
    steps: int = 50_000
    row_bytes: int = 1_000
    characters: int = 500
    selects: int = 3


class ReadOnlyDatabase:
    """A database of ``tables``, each with its columns and its rows; close it when the episode is over."""

    def __init__(self, tables: Mapping[str, Table], limits: SqlLimits | None = None) -> None:
        self._limits = limits or SqlLimits()
        self._connection = _opened(tables)
        self._connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, self._limits.row_bytes)
        self._connection.setlimit(sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH, 50)
        self._connection.set_authorizer(_authorizer(frozenset((*tables, *_SCHEMA))))

    def answer(self, query: str) -> str:
        """The rows that a query finds, one a line.

        Raises:
            CallError: the query is wrong, refused, or takes more than its limits.
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
        except (sqlite3.Error, sqlite3.Warning, UnicodeError) as error:  # a warning: two statements; then bad Unicode
            is_late = str(error) == "interrupted"
            raise CallError("the query takes too many steps" if is_late else str(error)) from None
        shown = [" | ".join(map(_written, row)) for row in rows[: self._limits.rows]]
        return "\n".join([*shown, MORE] if len(rows) > len(shown) else shown) or "no rows"

    def close(self) -> None:
        """End it; nothing is left of it on disk."""
        self._connection.close()


def _opened(tables: Mapping[str, Table]) -> sqlite3.Connection:
    """A connection that reads only, to a file without a name."""
    made = sqlite3.connect(":memory:")
    for name, (columns, rows) in tables.items():
        made.execute(f'CREATE TABLE "{name}" ({", ".join(columns)})')
        made.executemany(f'INSERT INTO "{name}" VALUES ({", ".join("?" * len(columns))})', rows)
    made.commit()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "database.sqlite"
        path.write_bytes(made.serialize())
        made.close()
        # The calls of one episode come one after another, but not always from the same thread.
        uri = f"{path.as_uri()}?mode=ro&immutable=1"
        connection = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False)
        connection.execute("PRAGMA temp_store = MEMORY")  # what is sorted goes to no file either
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()  # it is read: its name may go
    return connection


def _authorizer(tables: frozenset[str]) -> Callable[..., int]:
    def is_allowed(action: int, first: str | None, second: str | None, *_: str | None) -> int:
        allowed = (
            action in (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_RECURSIVE)
            or (action == sqlite3.SQLITE_READ and (first in tables or second == ""))  # "": no column, count(*) is all
            or (action == sqlite3.SQLITE_FUNCTION and second in _FUNCTIONS)
        )
        return sqlite3.SQLITE_OK if allowed else sqlite3.SQLITE_DENY

    return is_allowed


def _written(value: int | float | str | bytes | None) -> str:
    return "NULL" if value is None else value.hex() if isinstance(value, bytes) else str(value)

"""Old flow runs and events in the embedded Prefect's database, and unused pages of both tools' databases.

A Prefect server removes them itself (``PREFECT_SERVER_SERVICES_DB_VACUUM_ENABLED``); the embedded one, which lives as
long as a run, does not come to it.
"""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from rlcore.tasks.store.settings import Home

_ENDED = "state_type IN ('COMPLETED', 'FAILED', 'CANCELLED', 'CRASHED') AND parent_task_run_id IS NULL"
_QUERIES = {
    "Prefect flow run": f"SELECT count(*), min(end_time) FROM flow_run WHERE {_ENDED} AND end_time < ?",
    "Prefect event": "SELECT count(*), min(occurred) FROM events WHERE occurred < ?",
}
_LEAST = timedelta(hours=2)  # Prefect removes nothing younger than an hour
_UNUSED = 0.2  # fraction of a database's pages from which it is rewritten
_SECONDS = 5.0  # to wait for another process that has the database


@dataclass(frozen=True, kw_only=True)
class OldRows:
    """Rows of Prefect's database that can go: their number, and the time of the oldest."""

    kind: str
    count: int
    oldest: float


def prefect_database(home: Home) -> Path:
    """Return the file of the embedded Prefect's database."""
    return home.prefect / "prefect.db"


def old_rows(home: Home, *, before: float) -> list[OldRows]:
    """Return the old rows of the embedded Prefect's database, by kind."""
    path, found = prefect_database(home), list[OldRows]()
    if not path.is_file() or not path.stat().st_size:
        return found
    limit = f"{_utc(before):%Y-%m-%d %H:%M:%S.%f}"  # as Prefect writes times
    with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as database:
        for kind, query in _QUERIES.items():
            try:
                count, oldest = database.execute(query, (limit,)).fetchone()
            except sqlite3.OperationalError:  # its tables are not made yet
                continue
            if count:
                moment = datetime.fromisoformat(oldest).replace(tzinfo=UTC).timestamp()
                found.append(OldRows(kind=kind, count=count, oldest=moment))
    return found


def remove_old_rows(home: Home, *, before: float) -> bool:
    """Remove them by Prefect's own functions, with the logs, artifacts and task runs of the flow runs."""
    from prefect.settings import (
        PREFECT_SERVER_EVENTS_RETENTION_PERIOD,
        PREFECT_SERVER_SERVICES_DB_VACUUM_RETENTION_PERIOD,
        temporary_settings,
    )

    age = max(_LEAST, datetime.now(UTC) - _utc(before))
    with temporary_settings(
        {PREFECT_SERVER_SERVICES_DB_VACUUM_RETENTION_PERIOD: age, PREFECT_SERVER_EVENTS_RETENTION_PERIOD: age}
    ):
        asyncio.run(_vacuum(f"sqlite+aiosqlite:///{prefect_database(home)}"))
    return True


def compact(path: Path, *, patience: float = _SECONDS) -> int:
    """Rewrite a SQLite database with many unused pages; return the bytes that this frees, 0 if another process has it.

    A kill leaves the database as it was.
    """
    before = _size(path)
    if not path.is_file():
        return 0
    with closing(sqlite3.connect(path, timeout=patience, isolation_level=None)) as database:
        try:
            names = ("page_count", "freelist_count")
            pages, unused = (database.execute(f"PRAGMA {name}").fetchone()[0] for name in names)
            if unused > _UNUSED * pages:
                database.execute("VACUUM")
            database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        except sqlite3.OperationalError:
            return 0
    return max(0, before - _size(path))


async def _vacuum(url: str) -> None:
    from prefect.server.database.configurations import AioSqliteConfiguration
    from prefect.server.database.interface import PrefectDBInterface
    from prefect.server.database.orm_models import AioSqliteORMConfiguration
    from prefect.server.database.query_components import AioSqliteQueryComponents
    from prefect.server.services import db_vacuum

    config = AioSqliteConfiguration(connection_url=url)
    db = PrefectDBInterface(
        database_config=config, query_components=AioSqliteQueryComponents(), orm=AioSqliteORMConfiguration()
    )
    await db_vacuum.vacuum_old_flow_runs(db=db)
    await db_vacuum.vacuum_old_events(db=db)
    await (await config.engine()).dispose()


def _utc(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def _size(path: Path) -> int:
    return sum(each.stat().st_size for each in path.parent.glob(f"{path.name}*"))

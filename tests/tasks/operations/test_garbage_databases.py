"""Old rows of the embedded Prefect's database go by Prefect's own functions, and a database shrinks."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import uuid4

from prefect.server.database.configurations import AioSqliteConfiguration
from prefect.server.database.interface import PrefectDBInterface
from prefect.server.database.orm_models import AioSqliteORMConfiguration
from prefect.server.database.query_components import AioSqliteQueryComponents
from prefect.server.schemas.states import StateType
from sqlalchemy.schema import CreateTable

from rlcore.tasks.operations.garbage_databases import compact, old_rows, remove_old_rows
from rlcore.tasks.store.settings import Home

AGES = (100, 40, 1)  # days


async def _make(path: Path) -> None:
    """A database with a flow run, a line of its log and an event of each age."""
    config = AioSqliteConfiguration(connection_url=f"sqlite+aiosqlite:///{path}")
    db = PrefectDBInterface(
        database_config=config, query_components=AioSqliteQueryComponents(), orm=AioSqliteORMConfiguration()
    )
    engine = await config.engine()
    async with engine.begin() as connection:
        for table in db.Base.metadata.sorted_tables:
            await connection.execute(CreateTable(table))
    async with db.session_context(begin_transaction=True) as session:
        flow = db.Flow(name="toy")
        session.add(flow)
        await session.flush()
        for days in AGES:
            at = datetime.now(UTC) - timedelta(days=days)
            run = db.FlowRun(flow_id=flow.id, name=f"{days}", state_type=StateType.COMPLETED, end_time=at)
            session.add(run)
            await session.flush()
            session.add(db.Log(name="toy", level=20, flow_run_id=run.id, message=f"{days}", timestamp=at))
            facts = {"resource": {}, "related": [], "payload": {}, "resource_id": "toy"}
            session.add(db.Event(id=uuid4(), occurred=at, received=at, recorded=at, event="toy", **facts))
    await engine.dispose()


def counts(home: Home) -> dict[str, int]:
    with closing(sqlite3.connect(home.prefect / "prefect.db")) as database:
        return {
            table: database.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
            for table in ("flow_run", "log", "events")
        }


def test_old_flow_runs_and_events_go_with_their_logs(home: Home) -> None:
    assert old_rows(home, before=time.time()) == []  # no tables yet
    path = home.prefect / "prefect.db"
    asyncio.run(_make(path))
    before = time.time() - 30 * 86_400.0
    found = {rows.kind: rows for rows in old_rows(home, before=before)}
    assert {kind: rows.count for kind, rows in found.items()} == {"Prefect flow run": 2, "Prefect event": 2}
    assert abs(found["Prefect event"].oldest - (time.time() - 100 * 86_400.0)) < 600.0
    assert remove_old_rows(home, before=before)
    assert counts(home) == {"flow_run": 1, "log": 1, "events": 1}
    assert old_rows(home, before=before) == []


def test_a_database_with_unused_pages_shrinks_and_one_in_use_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE t (x TEXT)")
        database.executemany("INSERT INTO t VALUES (?)", [("x" * 1000,)] * 1000)
        database.commit()
        database.execute("DELETE FROM t WHERE rowid > 1")
        database.commit()
    size = path.stat().st_size
    with closing(sqlite3.connect(path)) as other:
        other.execute("BEGIN EXCLUSIVE")
        assert compact(path, patience=0.1) == 0
    assert compact(path) > size * 0.9
    with closing(sqlite3.connect(path)) as database:
        assert database.execute("SELECT count(*) FROM t").fetchone() == (1,)
    assert compact(tmp_path / "none.db") == 0

"""Databases of `make services`, on a real PostgreSQL."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.services import postgres
from infra.services.layout import Layout, save_layout
from rlcore.errors import ServiceError
from rlcore.tasks.operations.postgres import dump_databases
from tests.integration.service_runs import free_ports
from tests.waiting import LONG, until


@pytest.fixture
def layout() -> Iterator[Layout]:
    """A running cluster, in a folder that PostgreSQL's user may enter."""
    if shutil.which("initdb") is None:
        pytest.skip("PostgreSQL is not installed (infra/install_postgres.sh)")
    folder = Path(tempfile.mkdtemp(prefix="rlcore-postgres-"))
    folder.chmod(0o755)
    made = Layout(root=folder / "services", home=folder, ports=free_ports(("postgres", "prefect", "mlflow")))
    save_layout(made)
    postgres.make_cluster(made)
    with made.log("postgres").open("ab") as log:
        server = subprocess.Popen(postgres.command(made), stdout=log, stderr=log, cwd="/", **postgres.identity())
    try:
        until(lambda: postgres.is_ready(made), "a database")
        yield made
    finally:
        server.terminate()
        server.wait(LONG)
        shutil.rmtree(folder)


def sql(layout: Layout, statement: str, *, database: str = "prefect") -> str:
    password = postgres.passwords(layout)["postgres"]
    command = ["psql", "-h", "127.0.0.1", "-p", str(layout.ports["postgres"]), "-U", "postgres", "-d", database]
    run = [*command, "-tAc", statement]
    environment = os.environ | {"PGPASSWORD": password}
    return subprocess.run(run, env=environment, capture_output=True, text=True, check=True).stdout.strip()


def test_a_dump_fills_the_first_database_and_never_takes_the_place_of_one_that_was_lost(layout: Layout) -> None:
    postgres.make_databases(layout)
    sql(layout, "CREATE TABLE runs AS SELECT 1 AS number; ALTER TABLE runs OWNER TO prefect")
    dump = layout.home / "dumps" / "1" / "prefect.dump"
    dump.parent.mkdir(parents=True)
    dump_databases(layout.home, dump.parent)
    sql(layout, "DROP DATABASE prefect", database="postgres")
    with pytest.raises(ServiceError, match="the database prefect is gone, and the dump of ") as caught:
        postgres.make_databases(layout)
    assert str(layout.root / "prefect.made") in caught.value.fix
    assert sql(layout, "SELECT count(*) FROM pg_database WHERE datname = 'prefect'", database="postgres") == "0"
    (layout.root / "prefect.made").unlink()  # as after a restore
    postgres.make_databases(layout)
    assert sql(layout, "SELECT number FROM runs") == "1"
    sql(layout, "DROP DATABASE prefect", database="postgres")
    dump.unlink()
    postgres.make_databases(layout)
    assert sql(layout, "SELECT count(*) FROM pg_tables WHERE tablename = 'runs'") == "0"

"""Texts of rows in the databases of MLflow and Prefect: cells that quote a row are redacted, and free pages emptied."""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rlcore.errors import ServiceError
from rlcore.extras import install_command
from rlcore.tasks.operations.postgres import DATABASES, services_folder
from rlcore.tasks.operations.quotes import Quotes, redacted_text
from rlcore.tasks.pipeline.server_access import HOST
from rlcore.tasks.store.settings import Home

if TYPE_CHECKING:
    from sqlalchemy import Column, Connection, Engine, Table

_ROWS_AT_A_TIME, _BUSY_SECONDS = 1000, 60


def open_databases(home: Home) -> Iterator[tuple[str, Engine]]:
    """Yield the databases in a state directory, those of its services included, by name."""
    from sqlalchemy import create_engine

    for path in sorted(home.root.rglob("*.db")):
        options = {"connect_args": {"timeout": _BUSY_SECONDS}}
        yield path.relative_to(home.root).as_posix(), create_engine(f"sqlite:///{path}", **options)
    services = services_folder(home.root)
    if (services / "passwords.json").is_file():
        passwords = json.loads((services / "passwords.json").read_text(encoding="utf-8"))
        port = json.loads((services / "layout.json").read_text(encoding="utf-8"))["ports"]["postgres"]
        for name in DATABASES:
            yield f"the service's database {name}", _service_engine(name, passwords[name], port)


def _service_engine(name: str, password: str, port: int) -> Engine:
    from sqlalchemy import URL, create_engine
    from sqlalchemy.exc import OperationalError

    try:
        engine = create_engine(URL.create("postgresql+psycopg2", name, password, HOST, port, name))
        engine.connect().close()
    except (ImportError, OperationalError) as error:
        raise ServiceError(
            f"the database {name} of the services cannot be searched: {str(error).splitlines()[0]}",
            fix=f"{install_command('services')}, and start the services: make services",
        ) from error
    return engine


def count_quotes(engine: Engine, quotes: Quotes) -> Mapping[str, int]:
    """Return the numbers of cells that quote a row, by table and column."""
    with engine.connect() as connection:
        found = Counter(f"{column.table.name}.{column.name}" for column, _, _ in _quoting(connection, quotes))
    engine.dispose()
    return found


def redact(engine: Engine, quotes: Quotes) -> None:
    """Redact the cells that quote a row; then rewrite the database, whose free pages may have older copies."""
    with engine.begin() as connection:
        for column, key, text in list(_quoting(connection, quotes)):
            new = redacted_text(text, quotes)
            value = json.loads(new) if _is_json(column) else new
            table: Any = column.table
            rows = [table.c[name] == known for name, known in key.items()]
            connection.execute(table.update().where(*rows).values({column.name: value}))
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        is_sqlite = engine.dialect.name == "sqlite"
        connection.exec_driver_sql("VACUUM" if is_sqlite else "VACUUM FULL")
        if is_sqlite:
            connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")
    engine.dispose()


def _quoting(connection: Connection, quotes: Quotes) -> Iterator[tuple[Column[Any], Mapping[str, Any], str]]:
    """Yield column, key of the row, and text of each cell that quotes a row."""
    from sqlalchemy import String, Text, cast, select

    for table in _tables(connection):
        keys = list(table.primary_key) or list(table.columns)
        columns = [each for each in table.columns if isinstance(each.type, String) or _is_json(each)]
        texts = [cast(each, Text).label(f"text {place}") for place, each in enumerate(columns)]
        for row in connection.execute(select(*keys, *texts).execution_options(yield_per=_ROWS_AT_A_TIME)):
            key = dict(zip([each.name for each in keys], row, strict=False))
            for column, text in zip(columns, row[len(keys) :], strict=True):
                if text and quotes.are_in(text):
                    yield column, key, text


def _tables(connection: Connection) -> list[Table]:
    from sqlalchemy import MetaData

    metadata = MetaData()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about indexes on expressions
        metadata.reflect(connection)
    return list(metadata.tables.values())


def _is_json(column: Column[Any]) -> bool:
    from sqlalchemy import JSON

    return isinstance(column.type, JSON)

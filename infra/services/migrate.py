"""Migration of MLflow's records from the embedded database to the server: runs, models and files keep their ids."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from infra.services.layout import Layout, database
from rlcore.errors import ServiceError
from rlcore.tasks.store.settings import Home
from rlcore.tasks.tracking.database import rewrite_artifact_paths

if TYPE_CHECKING:
    from sqlalchemy import Connection, Table

_ROWS = 1000  # rows at a time
_SERVED = "mlflow-artifacts:"  # URI of its folder in the server's artifact proxy


def migrate(layout: Layout) -> str:
    """Copy all records and files, atomically; return their number. The embedded ones are unchanged.

    Raises:
        ServiceError: there is nothing to copy, the server has runs already, or the MLflow versions differ.
    """
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository
    from sqlalchemy import create_engine

    home = Home(layout.home)
    source_path = layout.home / "mlflow.db"
    if not source_path.exists():
        raise ServiceError("there is no embedded MLflow database to copy", where=str(source_path))
    rewrite_artifact_paths(home)
    source, target = create_engine(home.tracking_uri), create_engine(database(layout, "mlflow", "postgresql+psycopg2"))
    with source.connect() as old, target.begin() as new:
        _refuse_unequal(old, new)
        get_artifact_repository(layout.destination).log_artifacts(str(home.mlartifacts))  # type: ignore[no-untyped-call]
        prefix = home.mlartifacts.as_uri()
        _remove_defaults(new)
        counts = [_copy(table, old, new, prefix) for table in _tables()]
        _go_on_counting(new)
    return f"{sum(counts)} records and the files of {home.mlartifacts} are on the server; the old ones stay\n"


def _tables() -> list[Table]:
    import mlflow.store.model_registry.dbmodels.models
    import mlflow.store.tracking.dbmodels.models  # noqa: F401  (both fill the base's list of tables)
    from mlflow.store.db.base_sql_model import Base

    tables: list[Table] = Base.metadata.sorted_tables
    return tables


def _refuse_unequal(old: Connection, new: Connection) -> None:
    from sqlalchemy import text

    versions = [each.execute(text("SELECT version_num FROM alembic_version")).scalar() for each in (old, new)]
    if versions[0] != versions[1]:
        raise ServiceError(
            f"the two databases have different tables ({versions[0]} and {versions[1]})",
            fix="upgrade the old one first: mlflow db upgrade sqlite:///<home>/mlflow.db",
        )
    if new.execute(text("SELECT count(*) FROM runs")).scalar():
        raise ServiceError("the server has runs of its own, with which the old ones could collide", fix="migrate first")


def _remove_defaults(new: Connection) -> None:
    """Remove the rows of a new server, such as the experiment "Default": the old database has them."""
    from sqlalchemy import delete

    for table in reversed(_tables()):
        new.execute(delete(table))


def _copy(table: Table, old: Connection, new: Connection, prefix: str) -> int:
    from sqlalchemy import insert, select

    count = 0
    for rows in old.execute(select(table)).mappings().partitions(_ROWS):
        moved = [{name: _served(value, prefix) for name, value in row.items()} for row in rows]
        new.execute(insert(table), moved)
        count += len(moved)
    return count


def _served(value: Any, prefix: str) -> Any:
    """Convert a location below the embedded folder to the proxy's."""
    if isinstance(value, str) and value.startswith(prefix):
        return _SERVED + value.removeprefix(prefix)
    return value


def _go_on_counting(new: Connection) -> None:
    """Advance PostgreSQL's sequences beyond rows with explicit ids."""
    from sqlalchemy import Integer, text

    for table in _tables():
        for column in table.primary_key.columns:
            place = {"table": table.name, "column": column.name}
            counter = new.execute(text("SELECT pg_get_serial_sequence(:table, :column)"), place).scalar()
            if counter and isinstance(column.type, Integer):
                highest = f"(SELECT coalesce(max({column.name}), 0) FROM {table.name})"
                new.execute(text(f"SELECT setval('{counter}', greatest(1, {highest}))"))

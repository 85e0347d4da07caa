"""MLflow's embedded database: its tables are made aside, so that it is whole or not there."""

from __future__ import annotations

import logging

from rlcore.tasks.store.disk import sync
from rlcore.tasks.store.passwords import private_file
from rlcore.tasks.store.settings import Home


def make_database(home: Home) -> None:
    """Make the home's database, if there is none, in a file that then gets its name.

    Sixty migrations make the tables, each a transaction of its own. A kill between two of them leaves a database that
    MLflow refuses for ever; here it leaves a file that the next start removes. The caller holds the lock of MLflow.
    """
    path = home.root / "mlflow.db"
    if path.exists():
        return
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    logging.getLogger("alembic").setLevel(logging.WARNING)  # each migration is told of
    aside = path.with_name(f".{path.name}.new")
    for remains in home.root.glob(f"{aside.name}*"):  # SQLite's journal lies beside its file
        remains.unlink()
    private_file(aside)
    store = SqlAlchemyStore(f"sqlite:///{aside}", home.mlartifacts.as_uri())  # type: ignore[no-untyped-call]
    store.engine.dispose()
    sync(aside)
    aside.rename(path)
    sync(home.root)

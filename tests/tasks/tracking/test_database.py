"""MLflow's database is whole or not there, whatever a killed start has left beside it."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import mlflow.store.tracking.sqlalchemy_store as mlflow_store
import pytest

from rlcore.tasks.store.settings import Home
from rlcore.tasks.tracking.database import make_database
from rlcore.tasks.tracking.runs import open_tracker


def test_a_start_that_was_killed_while_tables_were_made_leaves_nothing_that_the_next_one_trips_over(
    home: Home, _empty_mlflow_database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    places: list[Path] = []

    def store(uri: str, artifacts: str) -> SimpleNamespace:
        """Makes the tables, as MLflow does; the first time it gets no further than half of them."""
        place = Path(uri.removeprefix("sqlite:///"))
        assert artifacts == home.mlartifacts.as_uri()
        assert place.read_bytes() == b""  # for its owner alone, before anything is in it
        places.append(place)
        if len(places) == 1:
            place.write_bytes(_empty_mlflow_database.read_bytes()[:4096])
            Path(f"{place}-journal").write_text("half a transaction")
            raise Killed
        shutil.copyfile(_empty_mlflow_database, place)
        return SimpleNamespace(engine=SimpleNamespace(dispose=lambda: None))

    monkeypatch.setattr(mlflow_store, "SqlAlchemyStore", store)
    with pytest.raises(Killed):
        make_database(home)
    assert not (home.root / "mlflow.db").exists()
    make_database(home)
    make_database(home)  # it is there, so nothing is made
    assert len(places) == 2
    assert [path.name for path in home.root.glob("*mlflow.db*")] == ["mlflow.db"]
    monkeypatch.undo()
    assert open_tracker(home).start_run("toy", "one", tags={}).run_id


def test_nothing_opens_the_database_before_it_is_made(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    class Made(BaseException):
        pass

    def look(_: Home) -> None:
        assert not (home.root / "mlflow.db").exists()
        raise Made

    monkeypatch.setattr("rlcore.tasks.tracking.runs.make_database", look)
    with pytest.raises(Made):
        open_tracker(home)
    assert not (home.root / "mlflow.db").exists()

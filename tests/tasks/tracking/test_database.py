"""MLflow's database: whole or absent after a kill, and right after a move of the state directory."""

from __future__ import annotations

import hashlib
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import mlflow.store.tracking.sqlalchemy_store as mlflow_store
import pytest

from rlcore.tasks.store.settings import Home
from rlcore.tasks.tracking.database import make_database, rewrite_artifact_paths
from rlcore.tasks.tracking.registry import download_model, find_version, register_model, set_alias
from rlcore.tasks.tracking.runs import Tracker, open_tracker
from tests.registered import sealed


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


def fill(home: Home, folder: Path) -> Tracker:
    """A run with a file, a trace's place and a champion, in an experiment whose name needs escapes."""
    tracker = open_tracker(home)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    package, sha256 = sealed(folder)
    with tracker.start_run("a name", "sft", tags={}) as run:
        run.log_artifact(folder / "config.json", "files")
        version = register_model(run, package, name="m", tags={"sha256": sha256})
    set_alias(tracker, version, "champion")
    return tracker


def places(home: Home, root: Path) -> list[tuple[str, str]]:
    """The tables and columns of MLflow's database in which the path ``root`` stands."""
    with closing(sqlite3.connect(home.root / "mlflow.db")) as database:
        tables = [row[0] for row in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        columns = [(table, row[1]) for table in tables for row in database.execute(f"PRAGMA table_info({table})")]
        query = "SELECT count(*) FROM {} WHERE instr(CAST({} AS TEXT), ?)"
        return [each for each in columns if database.execute(query.format(*each), (str(root),)).fetchone()[0]]


def digest(folder: Path) -> dict[str, str]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture
def copied(tracked_home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    """A copy of a filled home; the original is there, and every place that MLflow knows is in it."""
    fill(tracked_home, tmp_path / "first" / "model")
    copy = Home(tmp_path / "other place" / "home")
    shutil.copytree(tracked_home.root, copy.root)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", copy.tracking_uri)
    monkeypatch.setenv("RLCORE_HOME", str(copy.root))
    assert len(places(copy, tracked_home.root)) >= 4
    return copy


def test_no_path_of_a_copy_is_in_the_original(
    tracked_home: Home, copied: Home, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        assert rewrite_artifact_paths(copied) > 0
    assert str(copied.root) in caplog.text
    assert places(copied, tracked_home.root) == []
    assert rewrite_artifact_paths(copied) == 0


def test_a_copy_reads_and_writes_its_own_files_alone(tracked_home: Home, copied: Home, tmp_path: Path) -> None:
    before = digest(tracked_home.root)
    tracker = fill(copied, tmp_path / "second" / "model")
    assert digest(tracked_home.root) == before
    version = find_version(tracker, "m", "champion")
    assert version is not None
    assert version.version == 2


def test_a_model_is_loaded_from_a_copy_whose_original_is_gone(tracked_home: Home, copied: Home, tmp_path: Path) -> None:
    shutil.rmtree(tracked_home.root)
    open_tracker(copied)
    loaded = download_model("models:/m@champion", tmp_path / "loaded")
    assert (loaded / "config.json").read_text() == "{}"


def test_a_home_that_stays_is_not_written(tracked_home: Home, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fill(tracked_home, tmp_path / "first" / "model")
    before = digest(tracked_home.root)
    with caplog.at_level("INFO"):
        assert rewrite_artifact_paths(tracked_home) == 0
    assert "moved" not in caplog.text
    assert digest(tracked_home.root) == before


def test_an_experiment_that_somebody_keeps_on_another_disk_stays_there(tracked_home: Home) -> None:
    client = open_tracker(tracked_home).client
    number = client.create_experiment("shared", artifact_location="file:///data/mlartifacts/of-all")
    rewrite_artifact_paths(tracked_home)
    assert client.get_experiment(number).artifact_location == "file:///data/mlartifacts/of-all"


def test_runs_outside_of_every_experiment_of_ours_lie_in_the_home_too(tracked_home: Home) -> None:
    default = open_tracker(tracked_home).client.get_experiment("0")
    assert default.artifact_location == f"{tracked_home.mlartifacts.as_uri()}/0"

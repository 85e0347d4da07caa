"""Files of an MLflow run: second names of local ones, and copies where a server has MLflow's."""

from __future__ import annotations

from pathlib import Path

import pytest
from mlflow import MlflowClient

from rlcore.tasks.store.settings import Home
from rlcore.tasks.tracking.files import local_path
from rlcore.tasks.tracking.runs import open_tracker


def test_a_logged_file_lies_once_and_the_next_of_its_name_replaces_it(tracked_home: Home, tmp_path: Path) -> None:
    tracker = open_tracker(tracked_home)
    run = tracker.start_run("toy", "toy", tags={})
    folder = tmp_path / "tables"
    (folder / "inner").mkdir(parents=True)
    (folder / "a.txt").write_text("1")
    (folder / "inner" / "b.txt").write_text("2")
    for _ in range(2):  # the second time each has this name already
        run.log_artifact(folder / "a.txt", "one")
        run.log_artifact(folder, "all")
    place = local_path(tracker.client.get_run(run.run_id).info.artifact_uri)
    assert place is not None
    names = sorted(path.relative_to(place).as_posix() for path in place.rglob("*") if path.is_file())
    assert names == ["all/a.txt", "all/inner/b.txt", "one/a.txt"]
    assert (place / "one" / "a.txt").samefile(folder / "a.txt")
    (folder / "other.txt").write_text("3")
    (folder / "other.txt").rename(folder / "a.txt")
    run.log_artifact(folder / "a.txt", "one")
    assert [(place / name / "a.txt").read_text() for name in ("one", "all")] == ["3", "1"]


def test_a_server_gets_copies(tracked_home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[str, str]] = []
    run = open_tracker(tracked_home).start_run("toy", "toy", tags={})
    for name in ("log_artifact", "log_artifacts"):
        monkeypatch.setattr(MlflowClient, name, lambda _, run, path, folder: sent.append((path, folder)))
    monkeypatch.setattr("rlcore.tasks.tracking.files.local_path", lambda location: None)
    (tmp_path / "a.txt").write_text("1")
    run.log_artifact(tmp_path / "a.txt", "one")
    run.log_artifact(tmp_path, "all")
    assert sent == [(str(tmp_path / "a.txt"), "one"), (str(tmp_path), "all")]
    assert local_path("mlflow-artifacts:/1/x") is None

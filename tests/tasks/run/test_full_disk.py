"""A disk that fills while a pipeline runs: no run is shown as running for ever, and the next start goes on."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import event
from sqlalchemy.engine import Engine
from sqlalchemy.exc import OperationalError

from rlcore.errors import StorageError
from rlcore.tasks.kinds.kind import Stage
from rlcore.tasks.run.pipeline import run_pipeline
from rlcore.tasks.steps.base import StageContext, StageResult
from rlcore.tasks.store.settings import Home
from rlcore.tasks.store.storage import raise_on_full_disk
from rlcore.tasks.tracking.runs import open_tracker
from tests.tasks.run.toy_stages import DATA, RL, SFT, config

_WRITES = ("INSERT", "UPDATE", "DELETE")


class Disk:
    """True if it has no room for MLflow's database."""

    is_full = False


DISK = Disk()


def fill_disk(context: StageContext) -> StageResult:
    DISK.is_full = True
    context.tracker.set_tags({"a": "b"})
    raise AssertionError("the disk is full")


@pytest.fixture
def disk() -> Iterator[Disk]:
    """A disk that refuses what SQLite would write, as long as it is full."""
    made = DISK
    made.is_full = False

    def refuse(_: object, __: object, statement: str, *___: object) -> None:
        if made.is_full and statement.startswith(_WRITES):
            raise OperationalError(statement, {}, sqlite3.OperationalError("database or disk is full"))

    event.listen(Engine, "before_cursor_execute", refuse)
    yield made
    event.remove(Engine, "before_cursor_execute", refuse)


def statuses(home: Home) -> list[str]:
    client = open_tracker(home).client
    places = [each.experiment_id for each in client.search_experiments()]
    return sorted(run.info.status for run in client.search_runs(places))


def run_all(home: Home, *stages: Stage, report: Any = None) -> None:
    with raise_on_full_disk(home.root):
        run_pipeline(stages or (DATA, SFT, RL), config(), ["rl"], home=home, experiment="toy", report=report)


def test_a_disk_that_fills_at_publication_leaves_no_run_running(tracked_home: Home, disk: Disk) -> None:
    def publish(*_: object, **__: object) -> None:
        disk.is_full = True
        open_tracker(tracked_home).client.create_experiment("one more")

    with pytest.raises(StorageError, match="the disk is full"):
        run_all(tracked_home, report=publish)
    assert statuses(tracked_home).count("RUNNING") == 1  # nobody can tell MLflow
    assert len(list(tracked_home.leases.glob("*.json"))) == 1
    with pytest.raises(StorageError, match="the disk is full"):  # it still is
        run_all(tracked_home)
    assert len(list(tracked_home.leases.glob("*.json"))) >= 1
    disk.is_full = False
    published: list[object] = []
    run_all(tracked_home, report=lambda *_, **__: published.append(1))
    assert statuses(tracked_home) == ["FINISHED"] * 4
    assert list(tracked_home.leases.glob("*.json")) == []
    assert published == [1]


def test_a_disk_that_fills_in_a_stage_leaves_no_run_running(tracked_home: Home, disk: Disk) -> None:
    with pytest.raises(StorageError, match="the disk is full"):
        run_all(tracked_home, DATA, replace(SFT, run=fill_disk), RL)
    assert statuses(tracked_home) == ["FINISHED", "RUNNING", "RUNNING"]
    disk.is_full = False
    run_all(tracked_home)
    assert statuses(tracked_home) == [*["FINISHED"] * 4, "KILLED"]  # the stage's function is another one now
    assert list(tracked_home.leases.glob("*.json")) == []


def test_a_run_whose_own_error_comes_with_a_full_disk_says_its_own_error(tracked_home: Home, disk: Disk) -> None:
    def publish(*_: object, **__: object) -> None:
        disk.is_full = True
        raise ValueError("what went wrong")

    with pytest.raises(ValueError, match="what went wrong"):
        run_all(tracked_home, report=publish)
    disk.is_full = False
    run_all(tracked_home)
    assert "RUNNING" not in statuses(tracked_home)

"""A run that is killed again and again ends with the books of an undisturbed one; ``make chaos`` kills more often."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from tests.chaos.books import books, differences
from tests.chaos.chain import COMMAND, TOY, run_killed
from tests.chaos.points import POINTS, kinds_of
from tests.chaos.run import SMALL
from tests.flows.conftest import ROOT, environment, flows_arguments
from tests.flows.warm import run_warm

PLAN = "3:5"  # percent of the events, and which: a handful of kills, among them some between a call and its note


def test_a_run_that_is_killed_several_times_ends_with_the_same_books(undisturbed: Path, tmp_path: Path) -> None:
    ledger = tmp_path / "events"
    kills = run_killed([], tmp_path / "home", ledger, plan=PLAN, call=TOY)
    events = ledger.read_text(encoding="utf-8").splitlines()
    assert kills == len(events) >= 3
    assert len(set(events)) == len(events)
    assert differences(books(undisturbed), books(tmp_path / "home")) == []


FAST = ("noted", "logged", "closed")  # after the result, after its record, and at the end


@pytest.mark.parametrize(
    "point", [pytest.param(each, marks=() if each in FAST else pytest.mark.slow) for each in POINTS]
)
def test_stages_that_are_killed_at_a_point_end_with_the_same_books(
    undisturbed: Path, tmp_path: Path, point: str
) -> None:
    assert run_killed([], tmp_path / "home", tmp_path / "stages", plan=point, call=TOY) == 3
    assert differences(books(undisturbed), books(tmp_path / "home")) == []


@pytest.mark.slow  # whole runs, as `make chaos` has of every kind of stage
def test_the_curves_of_models_survive_a_kill_after_their_result_is_stored(tmp_path: Path) -> None:
    arguments = flows_arguments("run", *SMALL, "without=['stages.ppo','stages.grpo']", "promotion.challenger=sft")
    done = run_warm(arguments, environment(tmp_path / "undisturbed"), ROOT, call=COMMAND)
    assert done.returncode == 0, done.stderr
    run_killed(arguments, tmp_path / "home", tmp_path / "stages", plan="placed")
    assert kinds_of(tmp_path / "stages") >= {"sft", "reward_model"}
    assert differences(books(tmp_path / "undisturbed"), books(tmp_path / "home")) == []


def test_the_books_of_an_undisturbed_run_hold_each_thing_once(undisturbed: Path) -> None:
    lines = books(undisturbed)
    assert len([line for line in lines if line.startswith("run toy train: metric loss at 3")]) == 1
    assert not [line for line in lines if line.startswith("left:") or "RUNNING" in line]


def test_what_is_doubled_or_lost_shows_in_the_books(undisturbed: Path, tmp_path: Path) -> None:
    before = books(undisturbed)
    shutil.copytree(undisturbed, tmp_path / "home")
    undisturbed = tmp_path / "home"
    with closing(sqlite3.connect(undisturbed / "mlflow.db")) as database, database:
        database.execute("UPDATE metrics SET step = 2 WHERE key = 'loss' AND step = 3")
        database.execute("UPDATE runs SET status = 'RUNNING' WHERE name = 'toy judge'")
    (undisturbed / "work" / ".x.tmp").touch()
    found = differences(before, books(undisturbed))
    subjects = {line.partition(":")[0] for line in found}
    assert subjects == {"- run toy train", "+ run toy train", "- run toy judge", "+ run toy judge", "+ left"}

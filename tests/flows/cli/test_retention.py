"""``rlcore gc``: a dry run by default, a removal on demand, and a kill at any moment of it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from rlcore.flows.cli.app import main
from rlcore.tasks.store.artifacts import ArtifactStore
from rlcore.tasks.store.settings import Home
from rlcore.tasks.tracking.lineage import read_records
from tests.chaos.chain import run_killed
from tests.flows.conftest import ROOT, environment
from tests.flows.warm import run_warm
from tests.tasks.operations.daily import NAME, age, retrain

PLAN = "40:3"  # percent of the events that kill, and which


@pytest.fixture
def home(tracked_home: Home) -> Home:
    """Old retrainings: two champions, and two that were refused, of which one is the challenger."""
    for day in (1, 2, 3, 4):
        retrain(tracked_home, day, is_better=day < 3)
    age(tracked_home, 100.0)
    return tracked_home


def whole(home: Home) -> set[str]:
    """The digests of the results that are whole."""
    store = ArtifactStore(home.root)
    return {record.ref.sha256 for record in read_records(home) if not store.errors(record.ref)}


def test_the_command_shows_what_would_go_and_removes_it_when_asked(home: Home) -> None:
    before, env = whole(home), environment(home.root)
    shown = run_warm(["gc"], env, ROOT)
    assert shown.returncode == 0, shown.stderr
    assert "nothing was removed; to remove it: the same command with --delete" in shown.stdout
    assert whole(home) == before
    done = run_warm(["gc", "--keep-days", "30", "--delete"], env, ROOT)
    assert done.returncode == 0, done.stderr
    assert "result: policy" in done.stdout
    assert len(whole(home)) < len(before)
    lineage = run_warm(["lineage", f"{NAME}/3"], env, ROOT)
    assert "the artifact was cleaned on 20" in lineage.stdout
    again = run_warm(["gc"], env, ROOT)
    assert again.stdout.startswith("nothing that is older than 20")


def test_without_a_state_directory_nothing_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RLCORE_HOME", str(tmp_path / "none"))
    assert (main(["gc", "--delete"]), (tmp_path / "none").exists()) == (0, False)
    assert "nothing was run" in capsys.readouterr().out
    assert main(["gc", "--keep-days", "-1"]) == 2


def test_a_collection_that_is_killed_loses_nothing_and_the_next_one_finishes(home: Home, tmp_path: Path) -> None:
    copy = Home(tmp_path / "copy")
    shutil.copytree(home.root, copy.root, copy_function=shutil.copy2)
    undisturbed = run_warm(["gc", "--delete"], environment(copy.root), ROOT)
    assert undisturbed.returncode == 0, undisturbed.stderr
    kills = run_killed(["gc", "--delete"], home.root, tmp_path / "events", plan=PLAN)
    assert kills >= 10
    assert whole(home) == whole(copy)
    assert names(home) == names(copy)


def names(home: Home) -> set[str]:
    """The files of a state directory, but for databases and the log of what each collection was about to remove."""
    others = ("mlflow.db", "audit", "versions")
    return {path.relative_to(home.root).as_posix() for path in home.root.rglob("*") if not path.name.startswith(others)}

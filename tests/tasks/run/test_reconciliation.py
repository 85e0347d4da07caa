from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from rlcore.tasks.run.leases import hold_lease
from rlcore.tasks.run.reconciliation import CRASHES, SETTLED_SECONDS, Record, correction_of, living_runs
from rlcore.tasks.store.settings import Home
from tests.processes import wait_for_line

RUN = "11111111-2222-4333-8444-555555555555"
DAY = 86_400.0
DEAD = Record(state="RUNNING", count=1, heals=True, ours=True, seconds=SETTLED_SECONDS)
LOST = replace(DEAD, state="PENDING", count=0)
CRASHED = replace(DEAD, state="CRASHED")


@pytest.mark.parametrize(
    ("record", "correction"),
    [
        (DEAD, "resumes"),
        (LOST, "resumes"),
        (CRASHED, "resumes"),
        (replace(CRASHED, seconds=0.0), "resumes"),
        (replace(CRASHED, ours=False), "resumes"),  # of another machine, which has said so
        (replace(DEAD, count=CRASHES), "resumes"),
        (replace(DEAD, count=CRASHES + 1), "has crashed"),
        (replace(DEAD, heals=False), "has crashed"),
        (replace(CRASHED, count=CRASHES + 1), ""),
        (replace(CRASHED, count=0), ""),  # its code cannot even be loaded
        (replace(CRASHED, heals=False), ""),
        (replace(CRASHED, seconds=8 * DAY), ""),
        (replace(DEAD, seconds=8 * DAY), "resumes"),  # a machine was off for so long
        (replace(DEAD, ours=False), ""),  # its process is elsewhere
        (replace(DEAD, seconds=SETTLED_SECONDS - 1), ""),  # its worker may be about to say how it ended
        (replace(LOST, seconds=SETTLED_SECONDS - 1), ""),  # its worker may be about to start it
    ],
)
def test_a_run_without_a_process_goes_on_or_ends(record: Record, correction: str) -> None:
    assert correction_of(record, lives=False) == correction


@pytest.mark.parametrize("lives", [True, False])
def test_a_run_whose_cancellation_nobody_heard_is_cancelled(lives: bool) -> None:
    asked = replace(DEAD, state="CANCELLING")
    assert correction_of(asked, lives=lives) == "is cancelled"
    assert correction_of(replace(asked, ours=False), lives=lives) == ""
    assert (
        correction_of(replace(asked, seconds=SETTLED_SECONDS - 1), lives=lives) == ""
    )  # its worker may be about to do it


@pytest.mark.parametrize(
    ("record", "correction"),
    [
        (DEAD, ""),
        (LOST, ""),
        (CRASHED, "runs"),
        (replace(CRASHED, count=CRASHES + 1, heals=False, ours=False), "runs"),
        (replace(CRASHED, seconds=SETTLED_SECONDS - 1), ""),  # it may be ending
    ],
)
def test_a_run_whose_process_lives_is_left_alone_or_runs(record: Record, correction: str) -> None:
    assert correction_of(record, lives=True) == correction


@contextmanager
def engine(folder: Path, code: str, *, leads: bool = True) -> Iterator[None]:
    """A process with the command line and environment of a run's own."""
    package = folder / "prefect"
    package.mkdir(exist_ok=True)
    (package / "__init__.py").touch()
    (package / "engine.py").write_text(f"print('up', flush=True)\n{code}\nimport sys\nsys.stdin.read()\n")
    with subprocess.Popen(
        [sys.executable, "-m", "prefect.engine"],
        cwd=folder,
        env={"PREFECT__FLOW_RUN_ID": RUN, "PATH": os.environ["PATH"]},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=leads,
    ) as process:
        try:
            wait_for_line(process, "up")
            yield
        finally:
            process.kill()


def test_a_run_lives_while_its_own_process_does(home: Home, tmp_path: Path) -> None:
    assert RUN not in living_runs(home)
    with engine(tmp_path, ""):
        assert RUN in living_runs(home)
    assert RUN not in living_runs(home)


def test_what_a_run_has_started_does_not_keep_it_alive(home: Home, tmp_path: Path) -> None:
    with engine(tmp_path, "", leads=False):  # as a forked helper that is left behind
        assert RUN not in living_runs(home)


def test_a_run_lives_while_its_lease_is_held_and_looking_changes_nothing(home: Home) -> None:
    with hold_lease(home, experiment="toy", flow_run_id=RUN, attempt=1) as name:
        assert RUN in living_runs(home)
        lease = (home.leases / f"{name}.json").read_text()
    (home.leases / "dead.json").write_text(lease)
    assert RUN not in living_runs(home)
    assert (home.leases / "dead.json").read_text() == lease  # the next start needs it, to end the run in MLflow

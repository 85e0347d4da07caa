"""Runs without a process: what the next start ends, resumes and removes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import psutil
import pytest
from prefect.client.schemas.objects import FlowRun

from rlcore.tasks.run.leases import LEASE_TAG, end_orphaned_servers, hold_lease, recover_dead_runs
from rlcore.tasks.run.reconciliation import CRASHES, SETTLED_SECONDS, Record, correction_of, living_runs, missed_runs
from rlcore.tasks.store.settings import Home
from rlcore.tasks.tracking.runs import RunTracker, open_tracker
from tests.processes import wait_for_line

SERVER = "prefect.server.api.server:create_app"  # what the command line of an embedded Prefect server holds


@pytest.fixture
def dead_run(tracked_home: Home) -> RunTracker:
    """A run of the lease that :func:`leave_dead_lease` leaves."""
    return open_tracker(tracked_home).start_run("toy", "pipeline", tags={LEASE_TAG: "dead"})


def leave_dead_lease(home: Home, **changed: object) -> Path:
    """A lease like those that :func:`hold_lease` writes, held by nobody."""
    lease = {"host": "here", "pid": 1234, "experiment": "toy", "flow_run_id": "", "attempt": 0} | changed
    path = home.leases / "dead.json"
    path.write_text(json.dumps(lease))
    return path


def status(run: RunTracker) -> str:
    return str(run.client.get_run(run.run_id).info.status)


KILLED = """
import os, signal, sys
from pathlib import Path
from rlcore.tasks.run.leases import hold_lease
from rlcore.tasks.store.settings import Home
home = Home(Path(sys.argv[1]))
with hold_lease(home, experiment="toy") as name:
    print(name, flush=True)
    (home.mlartifacts / ".artifact.uploading.6d95bnc_").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def kill_one(home: Home, program: str) -> str:
    """Return the output of a process that kills itself."""
    home.mlartifacts.mkdir(exist_ok=True)
    command = [sys.executable, "-c", program, str(home.root)]
    killed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert list(home.mlartifacts.iterdir())
    return killed.stdout.strip()


def test_the_runs_of_a_killed_process_are_ended_and_its_lease_and_partial_files_are_gone(tracked_home: Home) -> None:
    tracker = open_tracker(tracked_home)
    lease = kill_one(tracked_home, KILLED)
    parent = tracker.start_run("toy", "pipeline", tags={LEASE_TAG: lease}).run_id
    child = tracker.start_run("toy", "stage", tags={}, parent=parent).run_id
    lines = recover_dead_runs(tracked_home)
    assert len(lines) == 1
    assert f"MLflow run {parent} marked KILLED (2 with its stages)" in lines[0]
    client = open_tracker(tracked_home).client
    assert [client.get_run(each).info.status for each in (parent, child)] == ["KILLED", "KILLED"]
    assert [*tracked_home.leases.iterdir(), *tracked_home.mlartifacts.iterdir()] == []
    assert recover_dead_runs(tracked_home) == ()


def test_a_live_run_is_left_alone(tracked_home: Home, dead_run: RunTracker) -> None:
    with hold_lease(tracked_home, experiment="toy") as name:
        dead_run.set_tags({LEASE_TAG: name})
        assert recover_dead_runs(tracked_home) == ()
        assert len(list(tracked_home.leases.iterdir())) == 1
    assert status(dead_run) == "RUNNING"
    assert list(tracked_home.leases.iterdir()) == []


def test_a_run_that_another_process_has_taken_up_again_is_left_alone(tracked_home: Home, dead_run: RunTracker) -> None:
    leave_dead_lease(tracked_home)
    with hold_lease(tracked_home, experiment="toy") as name:
        assert open_tracker(tracked_home).reopen_run(dead_run.run_id, tags={LEASE_TAG: name}) is not None
        assert recover_dead_runs(tracked_home) == ()
    assert status(dead_run) == "RUNNING"


def test_a_run_that_had_ended_needs_no_word(tracked_home: Home, dead_run: RunTracker) -> None:
    dead_run.end("FINISHED")
    leave_dead_lease(tracked_home)
    assert recover_dead_runs(tracked_home) == ()
    assert status(dead_run) == "FINISHED"
    assert list(tracked_home.leases.iterdir()) == []


def test_the_inline_engine_leaves_leases_of_prefect_runs_to_prefect(tracked_home: Home, dead_run: RunTracker) -> None:
    path = leave_dead_lease(tracked_home, flow_run_id="f", attempt=1)
    assert [line.partition(": ")[2] for line in recover_dead_runs(tracked_home)] == [
        f"MLflow run {dead_run.run_id} marked KILLED (1 with its stages)"
    ]
    assert not path.exists()
    assert json.loads(path.with_suffix(".flow").read_text())["flow_run_id"] == "f"
    assert recover_dead_runs(tracked_home) == ()
    assert path.with_suffix(".flow").exists()


def test_half_written_files_go_when_their_writer_is_dead_and_no_other_lives(tracked_home: Home) -> None:
    half = [
        tracked_home.cache / "sft" / ".abc.json.0123abcd.tmp",
        tracked_home.pages / "tiny" / ".abc.new" / "page.md",
        tracked_home.work / "abc" / "rollouts" / ".iteration-00001.parquet.0123abcd.tmp",
        tracked_home.mlartifacts / "tiny" / ".tmp-artifacts-0123abcd" / "weights",
        tracked_home.leases / ".abc.json.new",
        tracked_home.root / ".passwords.json.new",
        tracked_home.mlartifacts / "tiny" / "run" / "artifacts" / ".artifact.uploading.6d95bnc_",
    ]
    whole = [tracked_home.work / "abc" / "mlflow_run.json", tracked_home.work / "reproduce-1" / "leases" / ".x.tmp"]
    for path in (*half, *whole):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    (tracked_home.work / "abc.lock").touch()
    leave_dead_lease(tracked_home)
    with hold_lease(tracked_home, experiment="toy"):
        recover_dead_runs(tracked_home)
        assert all(path.exists() for path in half)  # who lives may be writing them
    recover_dead_runs(tracked_home)
    assert not any(path.exists() for path in (*half, half[1].parent, half[3].parent, tracked_home.work / "abc.lock"))
    assert all(path.exists() for path in whole)
    assert list(tracked_home.leases.iterdir()) == []


def test_partial_files_of_a_command_that_was_killed_outside_a_pipeline_go_at_the_next_start(tracked_home: Home) -> None:
    kill_one(tracked_home, KILLED.replace("hold_lease", "leased").replace('experiment="toy"', '"toy-grpo"'))
    recover_dead_runs(tracked_home)
    assert list(tracked_home.mlartifacts.iterdir()) == []
    assert open_tracker(tracked_home).client.get_experiment_by_name("toy-grpo") is None


def test_unfinished_outputs_go_and_work_folders_stay(tracked_home: Home) -> None:
    (tracked_home.work / "abc.output").mkdir()
    (tracked_home.work / "abc").mkdir()
    assert recover_dead_runs(tracked_home) == ("removed the unfinished output of stage abc",)
    assert [path.name for path in tracked_home.work.iterdir()] == ["abc"]


@pytest.fixture
def stand_in(home: Home) -> Iterator[list[int]]:
    """Ids of processes to be ended: sleepers whose command line is that of an embedded server."""
    started: list[int] = []
    yield started
    for pid in started:
        if psutil.pid_exists(pid):
            os.kill(pid, signal.SIGKILL)


def start_server(stand_in: list[int], kill_launcher: bool) -> int:
    """Start a process that starts a stand-in for the server, and dies at once or lives on."""
    code = f"""
import os, signal, subprocess, sys, time
from rlcore.tasks.run.leases import mark_launcher
mark_launcher()
server = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", {SERVER!r}], stdout=subprocess.DEVNULL)
print("server", server.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL) if {kill_launcher} else time.sleep(600)
"""
    launcher = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    server = int(wait_for_line(launcher, "server").split()[1])
    stand_in += [server, launcher.pid]
    while SERVER not in psutil.Process(server).cmdline():  # it is one as soon as the kernel shows its command line
        time.sleep(0.01)
    if kill_launcher:
        launcher.wait()
    assert launcher.stdout is not None
    launcher.stdout.close()
    launcher.returncode = launcher.returncode or 0  # the fixture ends it
    return server


def test_a_server_of_this_home_ends_with_its_launcher(home: Home, stand_in: list[int], tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as threads:
        living, server = threads.map(partial(start_server, stand_in), (False, True))
    assert end_orphaned_servers(Home(tmp_path / "other")) == ()
    assert psutil.pid_exists(server)
    assert end_orphaned_servers(home) == (f"ended the Prefect server {server} that a dead process had left",)
    assert not psutil.pid_exists(server) or psutil.Process(server).status() == psutil.STATUS_ZOMBIE
    assert end_orphaned_servers(home) == ()
    assert psutil.pid_exists(living)


RUN = "11111111-2222-4333-8444-555555555555"
DAY = 86_400.0
DEAD = Record(state="RUNNING", count=1, heals=True, ours=True, seconds=SETTLED_SECONDS)
LOST = replace(DEAD, state="PENDING", count=0)
CRASHED = replace(DEAD, state="CRASHED")
ASKED = replace(DEAD, state="CANCELLING")
SOON = SETTLED_SECONDS - 1


@pytest.mark.parametrize(
    ("record", "dead", "living"),
    [
        (DEAD, "resumes", ""),
        (LOST, "resumes", ""),
        (CRASHED, "resumes", "runs"),
        (replace(CRASHED, seconds=0.0), "resumes", ""),  # if it lives, it may be ending
        (replace(CRASHED, ours=False), "resumes", "runs"),  # of another machine, which has said so
        (replace(DEAD, count=CRASHES), "resumes", ""),
        (replace(DEAD, count=CRASHES + 1), "has crashed", ""),
        (replace(DEAD, heals=False), "has crashed", ""),
        (replace(CRASHED, count=CRASHES + 1), "", "runs"),
        (replace(CRASHED, count=0), "", "runs"),  # its code cannot even be loaded
        (replace(CRASHED, heals=False), "", "runs"),
        (replace(CRASHED, seconds=8 * DAY), "", "runs"),
        (replace(DEAD, seconds=8 * DAY), "resumes", ""),  # a machine was off for so long
        (replace(DEAD, ours=False), "", ""),  # its process is elsewhere
        (replace(DEAD, seconds=SOON), "", ""),  # its worker may be about to say how it ended
        (replace(LOST, seconds=SOON), "", ""),  # its worker may be about to start it
        (ASKED, "is cancelled", "is cancelled"),  # nobody heard of it
        (replace(ASKED, ours=False), "", ""),
        (replace(ASKED, seconds=SOON), "", ""),  # its worker may be about to do it
    ],
)
def test_the_record_of_a_run_follows_its_process(record: Record, dead: str, living: str) -> None:
    assert (correction_of(record, lives=False), correction_of(record, lives=True)) == (dead, living)


@contextmanager
def flow_engine(folder: Path, *, leads: bool = True) -> Iterator[None]:
    """A process with the command line and environment of a run's own."""
    package = folder / "prefect"
    package.mkdir(exist_ok=True)
    (package / "__init__.py").touch()
    (package / "engine.py").write_text("print('up', flush=True)\nimport sys\nsys.stdin.read()\n")
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


def test_a_run_lives_while_its_own_process_does_and_not_through_one_that_it_started(home: Home, tmp_path: Path) -> None:
    assert RUN not in living_runs(home)
    with flow_engine(tmp_path):
        assert RUN in living_runs(home)
    with flow_engine(tmp_path, leads=False):  # as a forked helper that is left behind
        assert RUN not in living_runs(home)


def test_a_run_lives_while_its_lease_is_held_and_looking_changes_nothing(home: Home) -> None:
    with hold_lease(home, experiment="toy", flow_run_id=RUN, attempt=1) as name:
        assert RUN in living_runs(home)
        lease = (home.leases / f"{name}.json").read_text()
    (home.leases / "dead.json").write_text(lease)
    assert RUN not in living_runs(home)
    assert (home.leases / "dead.json").read_text() == lease  # the next start needs it, to end the run in MLflow


NIGHT, NIGHTLY, HOURLY = datetime(2026, 1, 1, 2, tzinfo=UTC), uuid4(), uuid4()


def late(day: int, deployment: UUID = NIGHTLY, **more: Any) -> FlowRun:
    due = NIGHT + timedelta(days=day)
    fields = {"flow_id": uuid4(), "auto_scheduled": True, "expected_start_time": due, "deployment_id": deployment}
    return FlowRun(name=f"day {day}", **(fields | more))


@pytest.mark.parametrize(
    ("runs", "missed"),
    [
        ([], []),
        ([late(1)], []),  # due now, and late for less than a night
        ([late(1), late(2)], ["day 1"]),
        ([late(3), late(1), late(2)], ["day 1", "day 2"]),
        ([late(1), late(2, HOURLY)], []),  # of another schedule
        ([late(1, auto_scheduled=False), late(2)], []),  # somebody queued it
    ],
)
def test_a_run_is_missed_once_a_later_one_of_its_schedule_is_late_too(runs: list[FlowRun], missed: list[str]) -> None:
    assert [each.name for each in missed_runs(runs)] == missed

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from rlcore.tasks.run.leases import LEASE_TAG, end_orphaned_servers, hold_lease, recover_dead_runs
from rlcore.tasks.store.settings import Home, find_home
from rlcore.tasks.tracking.runs import RunTracker, open_tracker
from tests.flows.conftest import environment
from tests.flows.warm import run_warm
from tests.processes import wait_for_line

SERVER = "prefect.server.api.server:create_app"  # what the command line of an embedded Prefect server holds


@pytest.fixture
def run(tracked_home: Home) -> RunTracker:
    """One of the lease that :func:`leave_dead_lease` leaves."""
    return open_tracker(tracked_home).start_run("toy", "pipeline", tags={LEASE_TAG: "dead"})


def leave_dead_lease(home: Home, **changed: object) -> Path:
    """A lease like those that :func:`hold_lease` writes, held by nobody."""
    lease = {"host": "here", "pid": 1234, "experiment": "toy", "flow_run_id": "", "attempt": 0} | changed
    path = home.leases / "dead.json"
    path.write_text(json.dumps(lease))
    return path


def status(run: RunTracker) -> str:
    return str(run.client.get_run(run.run_id).info.status)


def start_runs_and_die(_: Sequence[str]) -> int:
    """Begin a run with a stage, and die: for the warm process."""
    home = find_home()
    tracker = open_tracker(home)
    with hold_lease(home, experiment="toy") as name:
        parent = tracker.start_run("toy", "pipeline", tags={LEASE_TAG: name})
        child = tracker.start_run("toy", "stage", tags={}, parent=parent.run_id)
        sys.stdout.write(f"{parent.run_id} {child.run_id}")
        sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    return 0


def test_the_runs_of_a_killed_process_are_ended_and_its_lease_is_gone(tracked_home: Home) -> None:
    killed = run_warm([], environment(tracked_home.root), tracked_home.root, call=f"{__name__}:start_runs_and_die")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    parent, child = killed.stdout.split()
    lines = recover_dead_runs(tracked_home)
    assert len(lines) == 1
    assert f"MLflow run {parent} marked KILLED (2 with its stages)" in lines[0]
    client = open_tracker(tracked_home).client
    assert [client.get_run(each).info.status for each in (parent, child)] == ["KILLED", "KILLED"]
    assert list(tracked_home.leases.iterdir()) == []
    assert recover_dead_runs(tracked_home) == ()


def test_a_live_run_is_left_alone(tracked_home: Home, run: RunTracker) -> None:
    with hold_lease(tracked_home, experiment="toy") as name:
        run.set_tags({LEASE_TAG: name})
        assert recover_dead_runs(tracked_home) == ()
        assert len(list(tracked_home.leases.iterdir())) == 1
    assert status(run) == "RUNNING"
    assert list(tracked_home.leases.iterdir()) == []


def test_a_run_that_another_process_has_taken_up_again_is_left_alone(tracked_home: Home, run: RunTracker) -> None:
    leave_dead_lease(tracked_home)
    with hold_lease(tracked_home, experiment="toy") as name:
        assert open_tracker(tracked_home).reopen_run(run.run_id, tags={LEASE_TAG: name}) is not None
        assert recover_dead_runs(tracked_home) == ()
    assert status(run) == "RUNNING"


def test_a_run_that_had_ended_needs_no_word(tracked_home: Home, run: RunTracker) -> None:
    run.end("FINISHED")
    leave_dead_lease(tracked_home)
    assert recover_dead_runs(tracked_home) == ()
    assert status(run) == "FINISHED"
    assert list(tracked_home.leases.iterdir()) == []


def test_the_inline_engine_leaves_leases_of_prefect_runs_to_prefect(tracked_home: Home, run: RunTracker) -> None:
    path = leave_dead_lease(tracked_home, flow_run_id="f", attempt=1)
    assert [line.partition(": ")[2] for line in recover_dead_runs(tracked_home)] == [
        f"MLflow run {run.run_id} marked KILLED (1 with its stages)"
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


def test_a_file_of_a_process_that_was_killed_before_its_lease_had_a_name_goes_at_the_next_start(
    tracked_home: Home,
) -> None:
    left = [tracked_home.leases / ".abc.json.new", tracked_home.root / ".passwords.json.new"]
    for path in left:
        path.parent.mkdir(exist_ok=True)
        path.touch()
    recover_dead_runs(tracked_home)
    assert not any(path.exists() for path in left)


KILLED_OUTSIDE = """
import os, signal, sys
from pathlib import Path
from rlcore.tasks.run.leases import leased
from rlcore.tasks.store.settings import Home
home = Home(Path(sys.argv[1]))
with leased(home, "toy-grpo"):
    (home.mlartifacts / ".artifact.uploading.6d95bnc_").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_partial_files_of_a_command_that_was_killed_outside_a_pipeline_go_at_the_next_start(tracked_home: Home) -> None:
    tracked_home.mlartifacts.mkdir(exist_ok=True)
    killed = subprocess.run([sys.executable, "-c", KILLED_OUTSIDE, str(tracked_home.root)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert list(tracked_home.mlartifacts.iterdir())
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


def start_server(stand_in: list[int], *, kill_launcher: bool) -> int:
    """A process that starts a stand-in for the server, and dies at once or lives on."""
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


def test_a_server_whose_launcher_is_dead_is_ended(home: Home, stand_in: list[int]) -> None:
    server = start_server(stand_in, kill_launcher=True)
    assert end_orphaned_servers(home) == (f"ended the Prefect server {server} that a dead process had left",)
    assert not psutil.pid_exists(server) or psutil.Process(server).status() == psutil.STATUS_ZOMBIE
    assert end_orphaned_servers(home) == ()


def test_a_server_whose_launcher_lives_is_left_alone(home: Home, stand_in: list[int]) -> None:
    server = start_server(stand_in, kill_launcher=False)
    assert end_orphaned_servers(home) == ()
    assert psutil.pid_exists(server)


def test_a_server_of_another_home_is_left_alone(home: Home, stand_in: list[int], tmp_path: Path) -> None:
    server = start_server(stand_in, kill_launcher=True)
    assert end_orphaned_servers(Home(tmp_path / "other")) == ()
    assert psutil.pid_exists(server)

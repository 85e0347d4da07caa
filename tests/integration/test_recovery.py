"""Schedules and recovery on the real servers: what fires, what a kill of everything costs, what is there afterwards."""

from __future__ import annotations

import importlib
import itertools
import os
import pkgutil
import re
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import prefect.server.services as known
import psutil
import pytest
from prefect.server.services import perpetual_services

from tests.integration.service_runs import SMALL, Services, command_of, running_services, wait_until
from tests.restic import page

pytestmark = pytest.mark.services


SCHEDULED = "import-sft/import-sft"  # the quickest
SLOT = 60  # seconds; a run takes a quarter of it on an idle machine, and most of it on a busy one
BOUND = 60.0  # seconds that a record may be wrong after the worker and the server are there again
END = 420.0
ENDED = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")
LONG = (*SMALL, "stages.grpo.num_iterations=5000", "stages.grpo.eval_every=0")  # lasts until it is cancelled


@pytest.fixture(scope="module")
def services() -> Iterator[Services]:
    with running_services(PREFECT_LOGGING_ROOT_LEVEL="INFO") as made:  # the server says which of its services ran
        yield made


@pytest.fixture(autouse=True)
def _no_run_is_left(services: Services) -> Iterator[None]:
    """Cancel what a test has left: a run of it would hold the slot that the next test's run waits for."""
    yield
    left = [each for each in services.runs_of("online-rl") if each["state_type"] not in ENDED]
    for run in sorted(left, key=lambda each: str(each["state_type"]) != "SCHEDULED"):  # else they would begin
        services.cancel(run["id"])


def test_every_background_service_of_the_server_runs_without_an_error(services: Services) -> None:
    def output(pattern: str) -> set[str]:
        return set(re.findall(pattern, services.log("prefect")))

    for _, module, _ in pkgutil.iter_modules(known.__path__):
        importlib.import_module(f"{known.__name__}.{module}")
    periodic = {each.function.__name__ for each in perpetual_services.get_perpetual_services()}
    least = {"schedule_deployments", "monitor_late_runs", "monitor_expired_leases"}

    def enabled() -> set[str]:
        return periodic & output(r" \* (\w+)\(")

    wait_until(lambda: least <= enabled() <= output(r"[↩↫] \[[^]]*\] (\w+)"), seconds=END, what="through all of them")
    assert output(r".*(?:ERROR|CRITICAL|Traceback).*") == set()


def test_an_interval_schedule_fires_once_a_slot_through_restarts_and_an_outage(services: Services) -> None:
    with scheduled(services) as runs:
        wait_until(lambda: len(completed(runs())) >= 3, seconds=END, what="fired three times")
        for service in ("prefect", "worker"):
            before = len(completed(runs()))
            services.kill(service)
            wait_until(lambda n=before: len(completed(runs())) >= n + 2, seconds=END, what=f"on after {service}")  # type: ignore[misc]
        assert services.command("down").returncode == 0
        time.sleep(2 * SLOT)
        assert services.command("up").returncode == 0
        back = time.time()
        wait_until(
            lambda: any(slot(each) > back for each in completed(runs())), seconds=END, what="caught up with its slots"
        )
        seen = completed(runs())
    slots = sorted(slot(each) for each in seen)
    gaps = {round(after - before) for before, after in itertools.pairwise(slots)}
    assert gaps == {SLOT}  # none twice, and none left out, also of those that were due in the outage
    whole = sorted((each for each in seen if each["run_count"] == 1), key=lambda each: str(each["start_time"]))
    assert all(str(one["end_time"]) <= str(two["start_time"]) for one, two in itertools.pairwise(whole))


def test_what_a_person_has_scheduled_outlives_a_new_registration(services: Services) -> None:
    retrain = services.ask("prefect", "api/deployments/name/retrain/retrain")
    (nightly,) = retrain["schedules"]
    assert (nightly["active"], nightly["slug"], nightly["schedule"]["cron"]) == (False, "nightly", "0 2 * * *")
    services.change("prefect", f"api/deployments/{retrain['id']}/schedules/{nightly['id']}", {"active": True})
    own = [{"schedule": {"cron": "0 5 * * 0", "timezone": "UTC"}, "active": False}]
    services.ask("prefect", f"api/deployments/{retrain['id']}/schedules", own)
    (services.root / "provisioned").unlink()
    assert services.command("up").returncode == 0
    kept = services.ask("prefect", "api/deployments/name/retrain/retrain")["schedules"]
    assert {each["schedule"]["cron"]: each["active"] for each in kept} == {"0 2 * * *": True, "0 5 * * 0": False}


def test_a_run_goes_on_within_a_minute_of_a_power_cut_also_when_the_server_dies_once_more(services: Services) -> None:
    run = start_long_run(services)
    cut_power(services)
    assert services.command("up").returncode == 0
    services.kill("prefect")
    wait_until(lambda: bool(services.flow_run(run)), seconds=END, what="answering again")
    seconds = wait_until(lambda: is_running(services, run, 2), seconds=BOUND, what="back at work")
    sys.stderr.write(f"back at work {seconds:.0f} s after the server\n")
    assert "resume: after iteration" in wait_for_log(services, run, "resume: after iteration")


def test_a_run_that_alone_is_killed_goes_on_within_a_minute(services: Services) -> None:
    run = start_long_run(services)
    for process in services.flow_processes():
        process.kill()
    wait_until(lambda: is_running(services, run, 2), seconds=BOUND, what="back at work")


def test_a_run_outlives_its_worker(services: Services) -> None:
    run = start_long_run(services)
    process, known = process_of(services, run), steps(services)
    psutil.Process(services.number("worker")).kill()
    seen = set(known)

    def is_further() -> bool:
        seen.update(steps(services))
        return len(seen) > len(known) + 3

    wait_until(is_further, seconds=END, what="some checkpoints further")
    assert process.is_running()
    assert is_running(services, run, 1)
    process.kill()  # and the new worker, which did not start it, finds it dead
    wait_until(lambda: is_running(services, run, 2), seconds=BOUND, what="back at work")


def test_a_server_that_was_away_finds_a_healthy_run_running_and_its_slot_taken(services: Services) -> None:
    run, waiting = start_long_run(services), services.submit("online-rl/grpo", *LONG, preset="tiny")
    supervisor = psutil.Process(services.number("supervisor"))
    supervisor.send_signal(signal.SIGSTOP)
    services.kill("prefect")
    time.sleep(200.0)
    supervisor.send_signal(signal.SIGCONT)
    wait_until(lambda: bool(services.flow_run(run)), seconds=END, what="answering again")
    for _ in range(int(BOUND)):
        time.sleep(1.0)
        assert is_running(services, run, 1)
        assert services.flow_run(waiting)["state_type"] == "SCHEDULED"


def test_a_healthy_run_that_was_called_crashed_runs_again_within_a_minute(services: Services) -> None:
    run = start_long_run(services)
    process = process_of(services, run)
    services.ask("prefect", f"api/flow_runs/{run}/set_state", {"state": {"type": "CRASHED"}, "force": True})
    wait_until(lambda: services.flow_run(run)["state_type"] == "RUNNING", seconds=BOUND, what="running")
    assert process.is_running()


def test_ready_means_that_everything_is_there_also_after_the_database_was_lost(services: Services) -> None:
    known = registered(services)
    assert known[0] > 15
    automation = services.ask("prefect", "api/automations/filter", {"limit": 1})[0]
    services.change("prefect", f"api/automations/{automation['id']}", None)
    status = services.command("status")
    assert (status.returncode, f"{known[1] - 1} of {known[1]} automations" in status.stdout) == (1, True), status.stdout
    assert services.command("up").returncode == 0
    assert registered(services) == known
    assert services.command("down").returncode == 0
    shutil.rmtree(services.root / "postgres")
    up = services.command("up")
    assert (up.returncode, "NOT READY" in up.stdout) == (0, False), up.stdout + up.stderr
    assert registered(services) == known
    assert services.command("status").returncode == 0


def registered(services: Services) -> tuple[int, int]:
    return services.ask("prefect", "api/deployments/count", {}), services.ask("prefect", "api/automations/count", {})


@contextmanager
def scheduled(services: Services) -> Iterator[Any]:
    deployment = services.ask("prefect", f"api/deployments/name/{SCHEDULED}")["id"]
    services.deploy(SCHEDULED, *SMALL, preset="tiny")  # what follows is cached
    row = {"schedule": {"interval": SLOT}, "active": True, "parameters": {"overrides": SMALL}}
    (made,) = services.ask("prefect", f"api/deployments/{deployment}/schedules", [row])

    def runs() -> list[dict[str, Any]]:
        return [each for each in services.runs_of("import-sft") if each["auto_scheduled"]]

    yield runs
    services.change("prefect", f"api/deployments/{deployment}/schedules/{made['id']}", None)


def completed(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [each for each in runs if each["state_type"] == "COMPLETED"]


def slot(run: dict[str, Any]) -> float:
    return datetime.fromisoformat(run["expected_start_time"]).timestamp()


def start_long_run(services: Services) -> str:
    services.forget("grpo")
    run = services.submit("online-rl/grpo", *LONG, preset="tiny")
    wait_until(lambda: is_running(services, run, 1), seconds=END, what="running")
    known = steps(services)  # a run that was cancelled could still make one before this one began
    wait_until(lambda: bool(steps(services) - known), seconds=END, what="at a checkpoint")
    return run


def process_of(services: Services, run: str) -> psutil.Process:
    return psutil.Process(int(services.flow_run(run)["infrastructure_pid"]))


def steps(services: Services) -> set[Path]:
    """The checkpoints in the home now; older ones of a run are removed."""
    return set(services.home.glob("work/*/checkpoints/step-*"))


def cut_power(services: Services) -> None:
    """SIGKILL to all that the services have started, all at once."""
    marked = [each for each in psutil.process_iter() if is_marked(each, services)]
    for process in marked:
        process.send_signal(signal.SIGSTOP)  # nobody sees another die
    for process in marked:
        process.send_signal(signal.SIGKILL)
    psutil.wait_procs(marked, timeout=20.0)


def is_marked(process: psutil.Process, services: Services) -> bool:
    """True if a process belongs to the services; PostgreSQL's write over their environment."""
    try:
        is_ours = process.environ().get("RLCORE_STARTED_BY") == str(services.root)
        return process.pid != os.getpid() and (is_ours or str(services.root / "postgres") in command_of(process))
    except psutil.Error:
        return False


def is_running(services: Services, run: str, count: int) -> bool:
    found = services.flow_run(run)
    return (found["state_type"], found["run_count"]) == ("RUNNING", count)


def wait_for_log(services: Services, run: str, words: str) -> str:
    wait_until(lambda: words in services.logged(run), seconds=END, what=f"at {words!r}")
    return services.logged(run)


LOG = """
import mlflow
with mlflow.start_run(run_name="kept") as run:
    mlflow.log_metric("reward/mean", 1.0, step=3)
    mlflow.log_text("whole", "note.txt")
print(run.info.run_id)
"""


def activate(services: Services) -> None:
    retrain = services.ask("prefect", "api/deployments/name/retrain/retrain")
    (nightly,) = retrain["schedules"]
    services.change("prefect", f"api/deployments/{retrain['id']}/schedules/{nightly['id']}", {"active": True})


def test_servers_that_are_lost_with_their_home_come_back(tmp_path: Path) -> None:
    with running_services() as services:
        commands = page(tmp_path, services.variables)
        commands.begin(services.home)
        run = services.python(LOG, served=True).splitlines()[-1]
        activate(services)
        (dump,) = services.ask("prefect", "api/deployments/name/dump/dump")["schedules"]
        assert dump["active"] is False
        done = services.deploy("dump/dump")
        assert done.returncode == 0, done.stdout + done.stderr
        (made,) = (services.home / "dumps").glob("[0-9]*")
        assert {"mlflow.dump", "prefect.dump"} <= {path.name for path in made.iterdir()}
        commands.back_up(services.home)
        assert services.command("down").returncode == 0
        secrets = services.clients["MLFLOW_TRACKING_PASSWORD"]
        shutil.rmtree(services.home)
        restored = commands.restore(services.home)
        assert "`make services` loads mlflow.dump, prefect.dump" in restored
        assert not (services.root / "passwords.json").exists()
        up = services.command("up")
        assert up.returncode == 0, up.stdout + up.stderr
        assert services.steps(run) == [3]
        files = services.ask("mlflow", f"api/2.0/mlflow/artifacts/list?run_id={run}")["files"]
        assert [each["path"] for each in files] == ["note.txt"]
        (nightly,) = services.ask("prefect", "api/deployments/name/retrain/retrain")["schedules"]
        assert nightly["active"] is True
        assert services.clients["MLFLOW_TRACKING_PASSWORD"] != secrets

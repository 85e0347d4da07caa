"""Years of a team in minutes, in this order, on real servers; each act is killed once."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from email.message import Message
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlcore.tasks.store.settings import Home
from tests.flows.retraining import LEARN, SPOIL, write_data
from tests.integration.listeners import mailbox, receiver
from tests.integration.service_runs import Services, running_services, wait_until
from tests.restic import page
from tests.ssh_keys import ask_for_approvals
from tests.waiting import LONG

pytestmark = pytest.mark.rehearsal

MODEL = "team-grpo"
PRESET = """extends = "retrain"
name = "team"
"""
RUN_SECONDS = 600.0
EVENTS = {
    "rlcore.promotion.awaits",
    "rlcore.promotion.promoted",
    "rlcore.promotion.refused",
    "rlcore.promotion.rolled_back",
    "rlcore.run.failed",
}


@dataclass
class Team:
    """A team's preset and keys, its servers, what webhook, Slack and mailbox received, when commands are killed."""

    services: Services
    folder: Path
    received: list[dict[str, Any]]
    moments: random.Random
    slack: list[dict[str, Any]]
    mails: list[Message]

    @property
    def preset(self) -> str:
        return str(self.folder / "team.toml")

    @property
    def data(self) -> tuple[str, ...]:
        return write_data(self.folder / "data")

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "rlcore.flows", *arguments]

    @property
    def variables(self) -> dict[str, str]:
        clients = self.services.clients if (self.services.root / "clients.env").exists() else {}
        return self.services.variables | clients | {"COLUMNS": "200"}

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = self.command(*arguments)
        return subprocess.run(command, capture_output=True, text=True, env=self.variables, cwd=self.folder, check=False)

    def act(self, *arguments: str, within: float = 6.0) -> str:
        """Run a command, kill it with its children after at most ``within`` seconds, repeat it; return its output."""
        first = subprocess.Popen(
            self.command(*arguments),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self.variables,
            cwd=self.folder,
        )
        with suppress(subprocess.TimeoutExpired):
            output, _ = first.communicate(timeout=self.moments.uniform(0.5, within))
            assert first.returncode == 0, output  # it ended before
            return output
        kill_all([psutil.Process(first.pid)])
        first.communicate()
        done = self.run(*arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def retrain(self, *overrides: str, killed: bool = True) -> dict[str, Any]:
        """Queue a retraining as Prefect's page does, kill its process once, and return its run when it has ended."""
        identifier = self.services.submit("retrain/retrain", *self.data, *overrides, preset=self.preset)
        return self.end_of(identifier, killed=killed)

    def end_of(self, run: str, *, killed: bool = True) -> dict[str, Any]:
        state = lambda: self.services.flow_run(run)["state_type"]  # noqa: E731
        ended = ("COMPLETED", "FAILED", "CANCELLED")
        wait_until(lambda: state() in ("RUNNING", *ended), seconds=RUN_SECONDS, what="begun")
        if killed:
            time.sleep(self.moments.uniform(5.0, 25.0))
            kill_all(self.services.flow_processes())
        wait_until(lambda: state() in ended, seconds=RUN_SECONDS, what="ended")
        return self.services.flow_run(run)

    def alias(self, name: str) -> str:
        query = f"api/2.0/mlflow/registered-models/get?name={MODEL}"
        aliases = self.services.ask("mlflow", query)["registered_model"].get("aliases", [])
        return next((each["version"] for each in aliases if each["alias"] == name), "")

    def events(self) -> list[str]:
        return [each["event"] for each in self.received]

    def expect(self, event: str, times: int) -> None:
        wait_until(lambda: self.events().count(event) >= times, seconds=LONG, what=f"told of {event}")


def kill_all(processes: list[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.Error):
            for each in (process, *process.children(recursive=True)):
                each.send_signal(signal.SIGKILL)


@pytest.fixture(scope="module")
def team(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Team]:
    folder = tmp_path_factory.mktemp("team")
    (folder / "team.toml").write_text(PRESET)
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "key")], check=True)
    public = (folder / "key.pub").read_text().split()
    with (
        running_services() as services,
        receiver(services.webhook) as received,
        receiver(services.slack) as slack,
        mailbox(services.mail) as mails,
    ):
        ask_for_approvals(Home(services.home), f"ada@example.org {public[0]} {public[1]}")
        made = Team(
            services=services, folder=folder, received=received, moments=random.Random(7), slack=slack, mails=mails
        )
        yield made
        down = made.services.command("down")  # elsewhere by now
        assert down.returncode == 0, down.stdout + down.stderr


def test_a_schedule_fires_and_the_first_model_awaits_a_person(team: Team) -> None:
    identifier = team.services.ask("prefect", "api/deployments/name/retrain/retrain")["id"]
    # Prefect plans the runs of a schedule within a minute, and none of the past.
    soon = (datetime.now(UTC) + timedelta(seconds=150)).isoformat()
    nightly = {
        "active": True,
        "schedule": {"interval": 86400.0, "anchor_date": soon},
        "parameters": {"preset": team.preset, "overrides": list(team.data)},
    }
    (made,) = team.services.ask("prefect", f"api/deployments/{identifier}/schedules", [nightly])
    wait_until(lambda: bool(team.services.runs_of("retrain")), seconds=LONG, what="planned")
    (run, *_) = sorted(team.services.runs_of("retrain"), key=lambda each: each["expected_start_time"])
    ended = team.end_of(run["id"])
    assert ended["state_type"] == "COMPLETED", team.services.logged(run["id"])
    team.services.change("prefect", f"api/deployments/{identifier}/schedules/{made['id']}", {"active": False})
    team.expect("rlcore.promotion.awaits", 1)
    assert (team.alias("champion"), team.alias("candidate")) == ("", "1")


def approve(team: Team, version: int) -> None:
    team.act("approve", f"{MODEL}/{version}", "--reason", "read its answers", "--key", str(team.folder / "key"))
    assert (team.alias("champion"), team.alias("candidate")) == (str(version), "")


def test_a_person_approves_it(team: Team) -> None:
    approve(team, 1)
    team.expect("rlcore.promotion.promoted", 1)


def test_a_better_model_awaits_and_is_approved(team: Team) -> None:
    assert team.retrain(*LEARN)["state_type"] == "COMPLETED"
    team.expect("rlcore.promotion.awaits", 2)
    assert (team.alias("champion"), team.alias("candidate")) == ("1", "2")
    approve(team, 2)


def test_a_worse_one_is_refused(team: Team) -> None:
    assert team.retrain(*SPOIL)["state_type"] == "COMPLETED"
    team.expect("rlcore.promotion.refused", 1)
    assert (team.alias("champion"), team.alias("challenger")) == ("2", "3")


def test_drifted_data_are_refused(team: Team) -> None:
    other = write_data(team.folder / "other", digits=6)
    run = team.services.submit("retrain/retrain", *other, preset=team.preset)
    assert team.end_of(run, killed=False)["state_type"] == "FAILED"
    team.expect("rlcore.run.failed", 1)


def test_the_champion_is_rolled_back(team: Team) -> None:
    team.act("rollback", f"{MODEL}/2", "--reason", "answers in the wrong language")
    team.expect("rlcore.promotion.rolled_back", 1)
    assert team.alias("champion") == "1"


def test_a_budget_stops_a_run_and_a_higher_one_resumes_it(team: Team) -> None:
    settings = [*team.data, "stages.grpo.num_iterations=3", "stages.grpo.learning_rate=1e-4"]
    run = ["run", team.preset, *(part for each in settings for part in ("--set", each))]
    stopped = team.run(*run, "--set", "budget.tokens=1")
    assert stopped.returncode == 3, stopped.stdout + stopped.stderr
    team.act(*run)


def test_everything_is_deleted_and_comes_back_elsewhere(team: Team) -> None:
    commands = page(team.folder, team.variables)
    before = team.run("audit", "show").stdout
    commands.begin(team.services.home)
    team.act("dump")
    commands.back_up(team.services.home)
    assert team.services.command("down").returncode == 0
    shutil.rmtree(team.services.home)
    team.services = replace(team.services, home=team.services.home.with_name("elsewhere"))
    commands.restore(team.services.home)
    up = team.services.command("up")
    assert up.returncode == 0, up.stdout + up.stderr
    assert team.alias("champion") == "1"
    assert team.run("audit", "show").stdout.startswith(before.rstrip("\n"))
    verified = team.run("audit", "verify")
    assert verified.returncode == 0, verified.stdout
    lineage = team.run("lineage", f"{MODEL}@champion")
    assert lineage.returncode == 0, lineage.stderr
    assert "preferences" in lineage.stdout
    reproduced = team.run("reproduce", f"{MODEL}/1", "--preset", team.preset)
    assert reproduced.returncode == 0, reproduced.stdout + reproduced.stderr


def test_the_models_that_were_trained_on_a_row_are_named(team: Team) -> None:
    request = team.folder / "request.jsonl"
    request.write_text('{"prompt": "12"}\n')  # a prompt of the training rows
    held = team.run("lineage", "--rows", str(request))
    assert (held.returncode, f"{MODEL}/1" in held.stdout) == (0, True), held.stdout + held.stderr


def test_what_nobody_needs_is_cleaned(team: Team) -> None:
    before = sum(path.stat().st_size for path in team.services.home.rglob("*") if path.is_file())
    team.act("gc", "--keep-days", "0", "--delete")
    after = sum(path.stat().st_size for path in team.services.home.rglob("*") if path.is_file())
    assert after < before
    assert team.run("lineage", f"{MODEL}@champion").returncode == 0


def test_every_event_was_received_and_the_audit_log_is_whole(team: Team) -> None:
    assert EVENTS - set(team.events()) == set()
    known = len(team.received)
    wait_until(lambda: len(team.slack) == len(team.mails) == known, seconds=LONG, what="told everywhere")
    verified = team.run("audit", "verify")
    assert verified.returncode == 0, verified.stdout
    shown = team.run("audit", "show").stdout
    for action in ("await", "approve", "promote", "refuse", "rollback", "restore", "gc"):
        assert action in shown, shown
    health = team.run("doctor", "--services")
    assert health.returncode == 0, health.stdout

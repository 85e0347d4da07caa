"""`make services` for real: PostgreSQL, Prefect, MLflow and a worker; deployments, kills, and what is left of each."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import urllib.error
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlcore.algorithms.table import ALGORITHMS
from rlcore.tasks.promotion.approvers import sign
from rlcore.tasks.promotion.promotion import statement
from rlcore.tasks.run.reconciliation import FAILED
from rlcore.tasks.store.audit_log import read_entries
from rlcore.tasks.store.settings import Home
from tests.flows.micro import WRECKED
from tests.flows.retraining import LEARN, NAME, SPOIL, write_data
from tests.integration.browser import REFUSALS, refusals
from tests.integration.listeners import mailbox, receiver
from tests.integration.service_runs import SMALL, Services, command_of, running_services, wait_until
from tests.ssh_keys import allowed, ask_for_approvals, make_key
from tests.waiting import LONG

pytestmark = pytest.mark.services

RESUME_SECONDS = 300.0  # from the kill of worker and flow until the run continues on a busy machine
END_SECONDS = 420.0
# Sums are no procedural problems. Another rate: what is evaluated does not train a finished stage anew.
WRONG_VERIFIER = ("evaluation.verifiers=[{kind='procedural'}]", "stages.grpo.learning_rate=2e-4")

FOREIGN = ("stages.ppo.", "stages.reward_model.", "data.preferences.")  # what the preset `distil` has not

Deployed = Mapping[str, subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def services() -> Iterator[Services]:
    with running_services() as made:
        yield made


@pytest.fixture(scope="module")
def notices(services: Services) -> Iterator[list[dict[str, Any]]]:
    with receiver(services.webhook) as received:
        yield received


@pytest.fixture(scope="module")
def deployed(services: Services) -> Deployed:
    names = ("reward-model/reward-model", "online-rl/ppo", "online-rl/grpo")
    return {name: services.deploy(name, *SMALL, preset="tiny") for name in names}


@pytest.fixture(scope="module")
def undisturbed(services: Services, deployed: Deployed) -> str:
    assert deployed["online-rl/grpo"].returncode == 0
    return services.weights("grpo")


def test_a_second_start_changes_nothing_and_no_password_is_to_be_seen(services: Services) -> None:
    before = {name: services.number(name) for name in ("postgres", "prefect", "mlflow", "worker")}
    up = services.command("up")
    assert (up.returncode, up.stdout.count("ready")) == (0, 4), up.stdout + up.stderr
    assert f"source {services.root}/clients.env" in up.stdout
    assert {name: services.number(name) for name in before} == before
    for name in ("passwords.json", "clients.env", "mlflow-users.ini"):
        assert (services.root / name).stat().st_mode & 0o777 == 0o600
    shown = up.stdout + " ".join(command_of(each) for each in psutil.process_iter())
    drawn = json.loads((services.root / "passwords.json").read_text())
    assert [name for name, secret in drawn.items() if secret in shown] == []


@pytest.mark.parametrize("service", ["prefect", "mlflow"])
def test_a_page_in_a_browser_is_refused_by_both_servers(services: Services, service: str) -> None:
    assert refusals(services.ports[service], services.let_in) == REFUSALS[service]


EMBEDDED = """
from pathlib import Path
from rlcore.tasks.store.artifacts import MANIFEST, ArtifactStore
from rlcore.tasks.tracking.mlflow_model import Card, Package
from rlcore.tasks.tracking.registry import register_model
from rlcore.tasks.tracking.registry import set_alias
from rlcore.tasks.store.settings import configure_environment, find_home
from rlcore.tasks.tracking.runs import open_tracker
configure_environment(find_home())
tracker = open_tracker(find_home())
folder = find_home().work / "artifact" / "model"
folder.mkdir(parents=True)
(folder / "model.safetensors").write_text("weights")
with tracker.start_run("old", "grpo", tags={"stage": "grpo"}) as run:
    for step in range(5):
        run.log_metrics({"reward/mean": step / 4}, step=step)
    run.log_artifact(folder / "model.safetensors", "plots")
    sha256 = ArtifactStore(folder).seal(folder.parent, kind="policy").sha256
    manifest = {MANIFEST: folder.parent / MANIFEST}
    package = Package(checkpoint=folder, card=Card(text="", license_id=""), beside=manifest)
    set_alias(tracker, register_model(run, package, name="old-grpo", tags={"sha256": sha256}), "kept")
print(run.run_id)
"""
FETCH = """
import sys
from pathlib import Path
from rlcore.tasks.tracking.registry import download_model
print((download_model("models:/old-grpo@kept", Path(sys.argv[1])) / "model.safetensors").read_text())
"""


def test_the_embedded_records_move_to_the_server_under_their_ids(services: Services, tmp_path: Path) -> None:
    run_id = services.python(EMBEDDED).splitlines()[-1]
    moved = services.command("migrate")
    assert moved.returncode == 0, moved.stdout + moved.stderr
    assert services.steps(run_id) == [0, 1, 2, 3, 4]
    listed = services.ask("mlflow", f"api/2.0/mlflow/artifacts/list?run_id={run_id}&path=plots")
    assert [each["path"] for each in listed["files"]] == ["plots/model.safetensors"]
    shutil.rmtree(services.home / "mlartifacts")  # what is on the server needs the old files no more
    assert services.python(FETCH, str(tmp_path), served=True) == "weights\n"
    again = services.command("migrate")
    assert (again.returncode, "runs of its own" in again.stderr) == (1, True), again.stderr
    experiments = services.ask("mlflow", "api/2.0/mlflow/experiments/search", {"max_results": 10})["experiments"]
    made = services.ask("mlflow", "api/2.0/mlflow/experiments/create", {"name": "new"})["experiment_id"]
    assert made not in {each["experiment_id"] for each in experiments}  # it counts on from the copied ones


@pytest.mark.parametrize("deployment", ["reward-model/reward-model", "online-rl/ppo", "online-rl/grpo"])
def test_a_deployment_runs_through_the_worker(deployed: Deployed, deployment: str) -> None:
    done = deployed[deployment]
    assert done.returncode == 0, done.stdout + done.stderr
    assert "finished successfully" in done.stdout


@pytest.mark.parametrize("algorithm", sorted(ALGORITHMS.keys() - {"ppo", "grpo"}))
def test_every_other_algorithm_runs_by_its_deployment(services: Services, deployed: Deployed, algorithm: str) -> None:
    stage = "ppo" if algorithm == "ppo_penalty" else "distil" if algorithm == "distil" else "grpo"
    small = [each for each in SMALL if algorithm != "distil" or not each.startswith(FOREIGN)]
    done = services.deploy(f"online-rl/{algorithm}", *small, f"stages.{stage}.num_iterations=1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "finished successfully" in done.stdout


def test_the_doctor_finds_the_installation_in_health(services: Services, deployed: Deployed) -> None:
    code = "from rlcore.flows.cli.app import main; main(['doctor', '--services'])"
    lines = services.python(code, served=True).splitlines()
    assert [line for line in lines if line.startswith("MISSING")] == [], lines
    assert sum(line.startswith(("ok", "-")) for line in lines) == 7


@pytest.mark.parametrize(
    ("parameters", "overrides", "message"),
    [
        ({"preset": "tinyy"}, (), "'tinyy' does not match"),
        ({"preset": "tiny"}, ("gprpo.seed=1",), "'gprpo.seed=1' does not match"),
        ({"preset": "own.toml", "stage": "a b"}, (), "'a b' does not match"),
        ({"preset": "tiny", "stage": "grpoo"}, (), "'grpoo' is not one of"),
        ({"preset": "tiny", "learning_rate": "1"}, (), "'learning_rate' was unexpected"),
    ],
)
def test_what_a_schema_can_tell_is_refused_before_a_run_is_queued(
    services: Services, parameters: dict[str, str], overrides: tuple[str, ...], message: str
) -> None:
    before = services.ask("prefect", "api/flow_runs/count", {})
    with pytest.raises(urllib.error.HTTPError) as refused:
        services.submit("online-rl/grpo", *overrides, **parameters)
    with refused.value as answer:
        assert (answer.code, message in json.loads(answer.read())["detail"]) == (409, True)
    assert services.ask("prefect", "api/flow_runs/count", {}) == before


def test_a_wrong_key_ends_the_run_with_our_message(services: Services) -> None:
    done = services.deploy("online-rl/grpo", "stages.grpo.learning_ratee=1", preset="tiny")
    assert done.returncode == 1, done.stdout + done.stderr
    run = next(line.rpartition(" ")[2] for line in done.stdout.splitlines() if "UUID:" in line)
    message = services.flow_run(run)["state"]["message"]
    assert "ConfigError" in message
    assert "unknown key" in message
    assert "grpo.learning_ratee" in message


def test_worker_and_run_killed_together_are_back_without_a_person(services: Services, undisturbed: str) -> None:
    run = start_and_wait_for_checkpoint(services)
    flows = services.flow_processes()
    assert flows
    services.kill("worker")
    seconds = wait_until(
        lambda: services.flow_run(run)["run_count"] == 2, seconds=RESUME_SECONDS, what="back at work after the kill"
    )
    sys.stderr.write(f"back at work {seconds:.0f} s after the kill\n")
    assert not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in flows)
    assert_undisturbed(services, run, undisturbed)
    assert "resume: after iteration" in services.logged(run)


@pytest.mark.parametrize("service", ["prefect", "mlflow", "postgres"])
def test_a_server_killed_during_a_run_costs_nothing(services: Services, undisturbed: str, service: str) -> None:
    run = start_and_wait_for_checkpoint(services)
    killed = services.kill(service)
    wait_until(lambda: services.number(service) != killed, seconds=LONG, what=f"{service} started again")
    assert_undisturbed(services, run, undisturbed)


def test_a_run_under_way_goes_on_when_everything_was_taken_down_and_brought_up(
    services: Services, undisturbed: str
) -> None:
    run = start_and_wait_for_checkpoint(services)
    for command in ("down", "up"):
        done = services.command(command)
        assert done.returncode == 0, done.stdout + done.stderr
    assert_undisturbed(services, run, undisturbed)
    assert "resume: after iteration" in services.logged(run)


def test_a_snapshot_of_new_preferences_retrains_the_champion(services: Services, tmp_path: Path) -> None:
    data = write_data(tmp_path / "data")
    done = services.deploy("retrain/retrain", *data, preset="retrain")
    assert done.returncode == 0, done.stdout + done.stderr
    assert services.champion(NAME) == "1"
    drop_rows(tmp_path / "data" / "preferences.jsonl", 5)
    services.submit("prepare-data/prepare-data", *data, *LEARN, preset="retrain")
    wait_until(lambda: len(services.runs_of("retrain")) == 2, seconds=END_SECONDS, what="retrained by the event")
    (_, run) = services.runs_of("retrain")
    assert (run["parameters"]["preset"], run["parameters"]["overrides"]) == ("retrain", [*data, *LEARN])
    wait_until(lambda: services.flow_run(run["id"])["state_type"] == "COMPLETED", seconds=END_SECONDS, what="completed")
    assert services.champion(NAME) == "2"
    assert len(services.runs_of("retrain")) == 2  # what a retraining prepares for itself starts no other


def test_a_failed_gate_and_a_failed_canary_call_the_webhook(
    services: Services, notices: list[dict[str, Any]], tmp_path: Path
) -> None:
    (tmp_path / "data").mkdir()
    data = write_data(tmp_path / "data")
    (tmp_path / "data" / "prompts.jsonl").write_text('{"prompt_id": "1"}\n')
    gate = services.submit("prepare-data/prepare-data", *data, preset="retrain")
    done = services.deploy("online-rl/grpo", *SMALL, *WRONG_VERIFIER, preset="tiny")
    assert done.returncode == 1, done.stdout + done.stderr
    refused = wait_for(notices, FAILED, text="prepare-data retrain (prepare-data): ConfigError: preset has 1 error")
    assert "prompts.jsonl" in refused["text"]
    assert refused["url"].endswith(gate)
    assert wait_for(notices, FAILED, text="grpo tiny (grpo): CanaryError: the reward")["run"] == "grpo tiny"


def test_a_refused_challenger_and_a_stopped_run_call_the_webhook(
    services: Services, notices: list[dict[str, Any]], tmp_path: Path
) -> None:
    done = services.deploy("retrain/retrain", *write_data(tmp_path / "data"), *SPOIL, preset="retrain")
    assert done.returncode == 0, done.stdout + done.stderr
    assert services.champion(NAME) == "2"  # of the retraining by the event
    done = services.deploy(
        "online-rl/grpo", *SMALL, *WRECKED, "stages.grpo.checkpoints.every_iterations=1", preset="tiny"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    refused, stopped = wait_for(notices, "rlcore.promotion.refused"), wait_for(notices, "rlcore.health.stopped")
    assert refused["text"].startswith(f"{NAME}/3: Refused: ")
    assert re.search(r"^grpo of tiny: stopped after iteration \d+: .*the result is iteration \d+", stopped["text"])


VERIFY = """
from rlcore.tasks.operations.audit import audit_errors
from rlcore.tasks.store.settings import find_home, prepare_environment
prepare_environment(find_home())
print(audit_errors(find_home())[0])
"""
TWO_CHAMPIONS = """
import sys
from pathlib import Path
from rlcore.tasks.store.settings import configure_environment, find_home
from rlcore.tasks.tracking.runs import open_tracker
from tests.registered import promote, register_versions
home = find_home()
configure_environment(home)
tracker = open_tracker(home)
first, second, _ = register_versions(tracker, Path(sys.argv[1]) / "model", "two")
promote(home, tracker, first, over=None)
promote(home, tracker, second, over=first)
"""


def test_a_version_becomes_champion_by_a_signature_in_the_form_and_every_act_calls_the_webhook(
    services: Services, notices: list[dict[str, Any]], tmp_path: Path
) -> None:
    key = make_key(tmp_path, "anna")
    ask_for_approvals(Home(services.home), allowed(key))
    asking = (
        "promotion.challenger=sft",
        *("promotion.min_accuracy=0.0", "promotion.max_truncated=1.0"),
    )
    done = services.deploy("promote/promote", *SMALL, *asking, "name=signed", preset="tiny")
    assert done.returncode == 0, done.stdout + done.stderr
    awaits = wait_for(notices, "rlcore.promotion.awaits", text="signed-sft/1: ")
    assert "rlcore approve signed-sft/1 --reason" in awaits["text"]
    with pytest.raises(urllib.error.HTTPError):  # nobody is champion yet
        services.champion("signed-sft")
    document = statement(Home(services.home), "signed-sft/1", "approve", "read fifty answers")
    given = {"version": "signed-sft/1", "document": document.strip(), "signature": sign(document, key)}
    run = services.submit("approve/approve", **given)
    promoted = wait_for(notices, "rlcore.promotion.promoted", text="signed-sft/1: approved by anna: read fifty")
    assert promoted["url"].endswith(run)
    assert services.champion("signed-sft") == "1"
    approval = read_entries(Home(services.home))[-2]
    assert (approval.actor["principal"], approval.actor["flow_run"]) == ("anna", "approve signed-sft/1")
    assert approval.actor["worker"]
    ask_for_approvals(Home(services.home))
    services.python(TWO_CHAMPIONS, str(tmp_path), served=True)
    services.submit("rollback/rollback", model="two", version=2, reason="answers are rude")
    back = wait_for(notices, "rlcore.promotion.rolled_back", text="two")
    assert back["text"] == "two/2: answers are rude; version 1 is champion again"
    assert services.champion("two") == "1"
    assert services.python(VERIFY, served=True).splitlines()[-1] == "()"


def test_a_failed_run_of_any_deployment_reaches_the_webhook_slack_and_the_mailbox_after_they_come_back(
    services: Services, notices: list[dict[str, Any]], tmp_path: Path
) -> None:
    run = services.submit("rollback/rollback", model="nobody", version=1, reason="rude")
    wait_until(lambda: services.flow_run(run)["state_type"] == "FAILED", seconds=END_SECONDS, what="failed")
    waiting = services.home / "outbox"
    wait_until(lambda: any(run in path.read_text() for path in waiting.glob("*.json")), seconds=LONG, what="put")
    with receiver(services.slack) as slack, mailbox(services.mail) as mails:
        message = wait_for(notices, FAILED, text=services.flow_run(run)["name"])
        assert "there is no champion" in message["text"] and message["url"].endswith(run)
        wait_until(lambda: not any(waiting.glob("*.json")), seconds=LONG, what="delivered")
    assert len({each["id"] for each in notices}) == len(notices) == len(slack) == len(mails)
    assert {each["To"] for each in mails} == {"team@example.org"}


def wait_for(notices: list[dict[str, Any]], event: str, *, text: str = "") -> dict[str, Any]:
    def found() -> list[dict[str, Any]]:
        return [each for each in notices if each["event"] == event and each["text"].startswith(text)]

    wait_until(lambda: bool(found()), seconds=END_SECONDS, what=f"told of {event}")
    return found()[-1]


def drop_rows(path: Path, count: int) -> None:
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-count]))


def start_and_wait_for_checkpoint(services: Services, *overrides: str) -> str:
    services.forget("grpo")
    return submit_and_wait_for_checkpoint(services, *overrides)


def submit_and_wait_for_checkpoint(services: Services, *overrides: str) -> str:
    """The same, that goes on from where the last one was."""
    known = set(services.home.glob("work/*/checkpoints/step-*"))
    run = services.submit("online-rl/grpo", *SMALL, *overrides, preset="tiny")
    wait_until(
        lambda: bool(set(services.home.glob("work/*/checkpoints/step-*")) - known),
        seconds=END_SECONDS,
        what="at a first checkpoint",
    )
    return run


def assert_undisturbed(services: Services, run: str, digest: str, *, iterations: int = 12) -> None:
    """The run completes, with every step recorded once and the very weights of a run to which nothing happened."""
    wait_until(lambda: services.flow_run(run)["state_type"] == "COMPLETED", seconds=END_SECONDS, what="completed")
    assert services.weights("grpo") == digest
    steps = services.steps(services.record("grpo")["ref"]["mlflow_run_id"])
    assert sorted(steps) == list(range(1, iterations + 1))
    assert [path.read_text() for path in (services.home / "leases").glob("*.json")] == []

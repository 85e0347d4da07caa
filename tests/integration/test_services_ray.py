"""`prefect deployment run online-rl/grpo` with a run that is placed on a Ray cluster.

Whole, cancelled, killed, and with a sampler, a scorer, a rank and the head killed, one each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import psutil
import pytest

from tests.integration.service_runs import SMALL, Services, command_of, wait_until
from tests.integration.test_services import (
    RESUME_SECONDS,
    assert_undisturbed,
    services,
    start_and_wait_for_checkpoint,
    submit_and_wait_for_checkpoint,
)
from tests.waiting import LONG

pytest.importorskip("ray")
pytestmark = pytest.mark.scale
__all__ = ["services"]  # a fixture

ITERATIONS = 6
PLACED = (
    "distributed.backend=ray",
    "distributed.learner_ranks=2",
    "distributed.ray.num_rollout_workers=2",
    "distributed.ray.num_reward_workers=1",
    f"stages.grpo.num_iterations={ITERATIONS}",
    "stages.grpo.eval_every=3",
)
HEAD = "gcs_server"
KINDS = (HEAD, "raylet", "ray::Rank", "ray::Sampler", "ray::Scorer")
PROMPTS, GROUP = 8, 4  # of an iteration of SMALL, and completions of each


@dataclass(frozen=True)
class Result:
    """Digest of the weights of `grpo`, and its tables of rollouts by iteration."""

    weights: str
    rollouts: tuple[bytes, ...]


@pytest.fixture(scope="module", autouse=True)
def as_nice_as_others() -> Iterator[None]:
    """Ray's processes on a machine that has other work; services are started after this."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_worker_niceness", "0")
        patch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "5")  # without its head a driver ends after a minute
        patch.delenv("RAY_ADDRESS", raising=False)  # each run has a cluster of its own
        yield


@pytest.fixture(scope="module")
def undisturbed(services: Services) -> Result:
    done = services.deploy("online-rl/grpo", *SMALL, *PLACED, preset="tiny")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "finished successfully" in done.stdout
    for table in tables(services):
        assert Counter(pd.read_parquet(table)["prompt_id"].value_counts()) == {GROUP: PROMPTS}
    return result(services)


def tables(services: Services) -> list[Path]:
    return sorted((services.home / services.record("grpo")["ref"]["uri"] / "rollouts").glob("*.parquet"))


def result(services: Services) -> Result:
    return Result(services.weights("grpo"), tuple(table.read_bytes() for table in tables(services)))


def assert_same(services: Services, run: str, undisturbed: Result) -> None:
    """It completes with the bits of the undisturbed run: every prompt once in each step; nothing of Ray is left."""
    assert_undisturbed(services, run, undisturbed.weights, iterations=ITERATIONS)
    assert result(services) == undisturbed
    wait_until(lambda: not of_ray(services), seconds=LONG, what="rid of the processes of Ray")


def of_ray(services: Services) -> list[psutil.Process]:
    """The processes of Ray that runs of these services have started, whoever is their parent by now."""
    home = str(services.home)
    found = []
    for each in psutil.process_iter():
        try:
            if any(kind in command_of(each) for kind in KINDS) and each.environ().get("RLCORE_HOME") == home:
                found.append(each)
        except psutil.Error:  # it has ended
            continue
    return [each for each in found if each.status() != psutil.STATUS_ZOMBIE]


def test_a_deployment_runs_on_a_cluster_and_logs_each_step_once(services: Services, undisturbed: Result) -> None:
    steps = services.steps(services.record("grpo")["ref"]["mlflow_run_id"])
    assert sorted(steps) == list(range(1, ITERATIONS + 1))
    wait_until(lambda: not of_ray(services), seconds=LONG, what="rid of the processes of Ray")


def test_a_cancelled_run_leaves_no_process_and_the_next_goes_on_and_is_killed_and_back_without_a_person(
    services: Services, undisturbed: Result
) -> None:
    run = start_and_wait_for_checkpoint(services, *PLACED)
    assert {kind for kind in KINDS if any(kind in command_of(each) for each in of_ray(services))} == {*KINDS}
    services.ask("prefect", f"api/flow_runs/{run}/set_state", {"state": {"type": "CANCELLING"}})
    wait_until(lambda: services.flow_run(run)["state_type"] == "CANCELLED", seconds=RESUME_SECONDS, what="cancelled")
    wait_until(lambda: not of_ray(services), seconds=LONG, what="rid of the processes of Ray")
    assert services.flow_run(run)["run_count"] == 1  # a crash would be started again

    run = submit_and_wait_for_checkpoint(services, *PLACED)
    cluster = of_ray(services)
    (head,) = [each for each in cluster if HEAD in command_of(each)]
    killed = head.parent()
    assert killed is not None and killed in services.flow_processes()
    killed.kill()
    wait_until(lambda: not {*cluster} & {*of_ray(services)}, seconds=LONG, what="rid of the first cluster")
    wait_until(lambda: services.flow_run(run)["run_count"] == 2, seconds=RESUME_SECONDS, what="back at work")
    assert_same(services, run, undisturbed)
    assert services.logged(run).count("resume: after iteration") == 2


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("ray::Sampler", ""),  # it says so where it is asked for completions before the next weights come
        ("ray::Scorer", ""),  # of which Ray alone knows
        ("ray::Rank", "is gone (The actor is dead because its worker process has died"),
    ],
)
def test_a_process_of_the_cluster_that_is_killed_is_replaced(
    services: Services, undisturbed: Result, kind: str, said: str
) -> None:
    run = start_and_wait_for_checkpoint(services, *PLACED)
    before = {each for each in of_ray(services) if kind in command_of(each)}
    max(before, key=lambda each: each.pid).kill()
    wait_until(
        lambda: bool({each for each in of_ray(services) if kind in command_of(each)} - before),
        seconds=RESUME_SECONDS,
        what=f"another {kind}",
    )
    assert_same(services, run, undisturbed)
    assert said in " ".join(services.logged(run).split())
    assert services.flow_run(run)["run_count"] == 1


def test_a_run_whose_head_is_killed_ends_and_is_back_without_a_person(services: Services, undisturbed: Result) -> None:
    run = start_and_wait_for_checkpoint(services, *PLACED)
    cluster = of_ray(services)
    (head,) = [each for each in cluster if HEAD in command_of(each)]
    head.kill()
    wait_until(lambda: not {*cluster} & {*of_ray(services)}, seconds=LONG, what="rid of the first cluster")
    wait_until(lambda: services.flow_run(run)["run_count"] == 2, seconds=RESUME_SECONDS, what="back at work")
    assert_same(services, run, undisturbed)
    assert "resume: after iteration" in services.logged(run)

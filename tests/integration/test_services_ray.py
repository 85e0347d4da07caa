"""`prefect deployment run online-rl/grpo` with a run that is placed on a Ray cluster: whole, cancelled, killed."""

from __future__ import annotations

from collections.abc import Iterator

import psutil
import pytest

from tests.integration.service_runs import SMALL, Services, wait_until
from tests.integration.test_services import (
    HEALED_SECONDS,
    assert_undisturbed,
    command_of,
    services,
    start_and_wait_for_checkpoint,
)

pytest.importorskip("ray")
pytestmark = pytest.mark.scale
__all__ = ["services"]  # a fixture

PLACED = (
    "placement.backend=ray",
    "placement.learner_ranks=2",
    "placement.ray.samplers=2",
    "placement.ray.scorers=1",
)
KINDS = ("gcs_server", "raylet", "ray::Rank", "ray::Sampler", "ray::Scorer")


@pytest.fixture(scope="module", autouse=True)
def as_nice_as_others() -> Iterator[None]:
    """Ray's processes on a machine that has other work; services are started after this."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_worker_niceness", "0")
        patch.delenv("RAY_ADDRESS", raising=False)  # each run has a cluster of its own
        yield


@pytest.fixture(scope="module")
def undisturbed(services: Services) -> str:
    """The digest of the weights that a run of `grpo` makes when nothing happens to it."""
    done = services.deploy("online-rl/grpo", *SMALL, *PLACED, preset="tiny")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "finished successfully" in done.stdout
    return services.weights("grpo")


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


def test_a_deployment_runs_on_a_cluster_and_logs_each_step_once(services: Services, undisturbed: str) -> None:
    steps = services.steps(services.record("grpo")["ref"]["mlflow_run_id"])
    assert sorted(steps) == list(range(1, 13))
    wait_until(lambda: not of_ray(services), seconds=30.0, what="rid of the processes of Ray")


def test_a_cancelled_run_leaves_no_process_and_the_next_one_goes_on(services: Services, undisturbed: str) -> None:
    run = start_and_wait_for_checkpoint(services, *PLACED)
    assert {kind for kind in KINDS if any(kind in command_of(each) for each in of_ray(services))} == {*KINDS}
    services.ask("prefect", f"api/flow_runs/{run}/set_state", {"state": {"type": "CANCELLING"}})
    wait_until(lambda: services.flow_run(run)["state_type"] == "CANCELLED", seconds=HEALED_SECONDS, what="cancelled")
    wait_until(lambda: not of_ray(services), seconds=30.0, what="rid of the processes of Ray")
    again = services.submit("online-rl/grpo", *SMALL, *PLACED, preset="tiny")
    assert_undisturbed(services, again, undisturbed)
    assert "goes on after iteration" in services.logged(again)


def test_a_killed_run_takes_its_cluster_with_it_and_is_back_without_a_person(
    services: Services, undisturbed: str
) -> None:
    run = start_and_wait_for_checkpoint(services, *PLACED)
    cluster = of_ray(services)
    (head,) = [each for each in cluster if "gcs_server" in command_of(each)]
    killed = head.parent()
    assert killed is not None and killed in services.flow_processes()
    killed.kill()
    wait_until(lambda: not {*cluster} & {*of_ray(services)}, seconds=60.0, what="rid of the first cluster")
    wait_until(lambda: services.flow_run(run)["run_count"] == 2, seconds=HEALED_SECONDS, what="back at work")
    assert_undisturbed(services, run, undisturbed)
    assert "goes on after iteration" in services.logged(run)
    wait_until(lambda: not of_ray(services), seconds=30.0, what="rid of the processes of Ray")

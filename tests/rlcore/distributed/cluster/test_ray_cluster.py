from __future__ import annotations

import re
import sys

import pytest

from rlcore.config import DistributedConfig, RayConfig, RewardTerm, to_dict
from rlcore.distributed.cluster import ray_cluster
from rlcore.distributed.cluster.ray_cluster import open_cluster
from rlcore.errors import ConfigError, SamplingError, ServiceError
from rlcore.extras import install_command
from tests.rlcore.distributed.cluster.fake_ray import FakeRay
from tests.rlcore.distributed.cluster.placed import TERMS, placement


def notes() -> list[str]:
    return []


def test_without_ray_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with (
        pytest.raises(ConfigError, match=rf"needs Ray(.|\n)*{re.escape(install_command('ray'))}"),
        open_cluster(placement(), gpus=False, log=print),
    ):
        pass


def test_room_is_kept_for_every_process_at_once_and_given_back(ray: FakeRay) -> None:
    where = DistributedConfig(
        backend="ray",
        learner_ranks=2,
        ray=RayConfig(num_rollout_workers=1, num_reward_workers=1, cpus=3, reward_worker_gpus=0.5),
    )
    with open_cluster(where, gpus=True, log=print) as cluster:
        (group,) = ray.groups
        assert group.bundle_specs == [{"CPU": 3.0, "GPU": 1.0}] * 3 + [{"CPU": 3.0, "GPU": 0.5}]
        assert ray.settings["address"] == "local" and ray.settings["num_cpus"] >= 12
        setup = {"threads": 1, "device": "cpu", "dtype": "float32"}
        cluster.launch("scorer", 0, setup=setup, restarts=3, lost=SamplingError)
        (actor,) = ray.actors
        assert (actor.options["scheduling_strategy"], actor.options["num_gpus"]) == (3, 0.5)
        assert (actor.options["max_restarts"], actor.options["max_task_retries"]) == (3, -1)
    assert ray.groups == [] and not ray.is_initialized()


@pytest.mark.parametrize(
    ("own", "named", "found"), [("ray://a:1", "", "ray://a:1"), ("", "b:2", "b:2"), ("ray://a:1", "b:2", "ray://a:1")]
)
def test_a_cluster_that_runs_is_found_by_the_preset_or_by_the_environment(
    own: str, named: str, found: str, ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", named)
    where = DistributedConfig(backend="ray", ray=RayConfig(address=own))
    with open_cluster(where, gpus=False, log=print):
        assert ray.settings["address"] == found and "num_cpus" not in ray.settings


def test_a_cluster_that_the_caller_has_joined_is_used_and_stays(ray: FakeRay) -> None:
    ray.init(address="mine")
    with open_cluster(placement(), gpus=False, log=print):
        pass
    assert ray.settings == {"address": "mine"}


def test_an_address_where_nobody_answers_is_named(ray: FakeRay) -> None:
    where = DistributedConfig(backend="ray", ray=RayConfig(address="nowhere:1"))
    with (
        pytest.raises(ServiceError, match=r"no Ray cluster(.|\n)*nowhere:1"),
        open_cluster(where, gpus=False, log=print),
    ):
        pass


def test_a_cluster_without_room_is_waited_for_so_long_and_said_what_it_has(
    ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray.room, said = False, notes()
    monkeypatch.setattr(ray_cluster, "_WAIT_SECONDS", 25.0)
    with (
        pytest.raises(ServiceError, match="no room for the run after 1 minutes: it has 1 of 4 CPUs"),
        open_cluster(placement(timeout_minutes=1.0), gpus=False, log=said.append),
    ):
        pass
    assert said == ["waiting for room on the Ray cluster: it has 1 of 4 CPUs"] * 2
    assert ray.groups == [] and not ray.is_initialized()


SETUP = {
    "threads": 1,
    "device": "cpu",
    "dtype": "float32",
    "models": {},
    "tokens_per_microbatch": 8,
    "prefill": "",
    "terms": [to_dict(term) for term in TERMS],
}


def test_a_process_that_is_silent_is_replaced_until_it_may_not_be(ray: FakeRay) -> None:
    said = notes()
    with open_cluster(placement(), gpus=False, log=said.append) as cluster:
        process = cluster.launch("scorer", 0, setup=SETUP, restarts=1, lost=SamplingError)
        ray.actors[0].hangs = True
        assert process.ask("score", 0, ()) == {"result": ()}
        assert said == ["scorer 0 timed out after 10 minutes: replaced"]
        ray.actors[0].hangs = True
        with pytest.raises(SamplingError, match=r"scorer 0 is gone, in 'score': The actor is dead because its worker"):
            process.ask("score", 0, ())


def test_what_fails_while_a_process_is_made_is_told_to_who_asks(ray: FakeRay) -> None:
    with open_cluster(placement(), gpus=False, log=print) as cluster:
        unknown = SETUP | {"terms": [to_dict(RewardTerm(kind="nothing"))]}
        process = cluster.launch("scorer", 0, setup=unknown, restarts=1, lost=SamplingError)
        with pytest.raises(ConfigError, match="unknown reward 'nothing'"):
            process.ask("score", 0, ())
        broken = cluster.launch("scorer", 0, setup={}, restarts=1, lost=SamplingError)
        with pytest.raises(SamplingError, match="scorer 0 failed in 'score': KeyError: 'threads'"):
            broken.ask("score", 0, ())
        bare = cluster.launch("scorer", 0, restarts=0, lost=SamplingError)
        with pytest.raises(SamplingError, match="it has no setup"):
            bare.ask("score", 0, ())
        asked = cluster.launch("scorer", 0, setup=SETUP, restarts=1, lost=SamplingError)
        with pytest.raises(SamplingError, match="a scorer has no method singing"):
            asked.ask("singing")

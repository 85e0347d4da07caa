"""A run on a cluster: its processes, samplers and scorers, and what replaces one that dies."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from rlcore.config import DistributedConfig, RayConfig, RewardTerm, SamplingConfig
from rlcore.distributed.cluster import ray_cluster
from rlcore.distributed.cluster.ray_cluster import connected, open_cluster
from rlcore.distributed.cluster.remote import RemoteWeights
from rlcore.errors import ConfigError, LearnerLostError, SamplingError, ServiceError
from rlcore.extras import install_command
from rlcore.loop import Components, train
from rlcore.loop.native import native_components
from rlcore.rewards.base import unwrap_reward
from rlcore.rewards.mix import WeightedReward
from rlcore.sampling.base import SamplingParams, replicas_of
from rlcore.types import Rollout
from tests import strategies
from tests.rlcore.distributed.cluster.fake_ray import Actor, FakeRay
from tests.rlcore.distributed.cluster.placed import RUNTIME, SETTINGS, TERMS, placed_components, placement
from tests.rlcore.distributed.cluster.scoring import even
from tests.rlcore.loop.conftest import MakeComponents, Tape


def notes() -> list[str]:
    return []


def test_missing_ray_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with (
        pytest.raises(ConfigError, match=rf"needs Ray(.|\n)*{re.escape(install_command('ray'))}"),
        open_cluster(placement(), gpus=False, log=print),
    ):
        pass


def test_resources_are_reserved_and_returned(ray: FakeRay) -> None:
    where = DistributedConfig(
        backend="ray",
        learner_ranks=2,
        ray=RayConfig(num_rollout_workers=1, num_reward_workers=1, cpus=3, reward_worker_gpus=0.5),
    )
    with open_cluster(where, gpus=True, log=print) as cluster:
        (group,) = ray.groups
        assert group.bundle_specs == [{"CPU": 3.0, "GPU": 1.0}] * 3 + [{"CPU": 3.0, "GPU": 0.5}]
        assert ray.settings["address"] == "local" and ray.settings["num_cpus"] >= 12
        setup = {"threads": 1, "runtime": RUNTIME}
        cluster.launch("scorer", 0, setup=setup, restarts=3, lost=SamplingError)
        (actor,) = ray.actors
        assert (actor.options["scheduling_strategy"], actor.options["num_gpus"]) == (3, 0.5)
        assert (actor.options["max_restarts"], actor.options["max_task_retries"]) == (3, -1)
    assert ray.groups == [] and not ray.is_initialized()


@pytest.mark.parametrize(
    ("own", "named", "found"), [("ray://a:1", "", "ray://a:1"), ("", "b:2", "b:2"), ("ray://a:1", "b:2", "ray://a:1")]
)
def test_running_cluster_is_found(
    own: str, named: str, found: str, ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", named)
    where = DistributedConfig(backend="ray", ray=RayConfig(address=own))
    with open_cluster(where, gpus=False, log=print):
        assert ray.settings["address"] == found and "num_cpus" not in ray.settings


def test_joined_cluster_stays_connected(ray: FakeRay) -> None:
    ray.init(address="mine")
    with open_cluster(placement(), gpus=False, log=print):
        pass
    assert ray.settings == {"address": "mine"}


def test_unreachable_cluster_is_named(ray: FakeRay) -> None:
    where = DistributedConfig(backend="ray", ray=RayConfig(address="nowhere:1"))
    with (
        pytest.raises(ServiceError, match=r"no Ray cluster(.|\n)*nowhere:1"),
        open_cluster(where, gpus=False, log=print),
    ):
        pass


def test_full_cluster_times_out(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
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
    "runtime": RUNTIME,
    "models": {},
    "tokens_per_microbatch": 8,
    "prefill": "",
    "terms": TERMS,
}


def test_silent_process_is_replaced(ray: FakeRay) -> None:
    said = notes()
    with open_cluster(placement(), gpus=False, log=said.append) as cluster:
        process = cluster.launch("scorer", 0, setup=SETUP, restarts=1, lost=SamplingError)
        ray.actors[0].hangs = True
        assert process.ask("score", 0, ()) == {"result": ()}
        assert said == ["scorer 0 timed out after 10 minutes: replaced"]
        ray.actors[0].hangs = True
        with pytest.raises(SamplingError, match=r"scorer 0 is gone, in 'score': The actor is dead because its worker"):
            process.ask("score", 0, ())


def test_failed_start_is_raised_to_caller(ray: FakeRay) -> None:
    with open_cluster(placement(), gpus=False, log=print) as cluster:
        unknown = SETUP | {"terms": (RewardTerm(kind="nothing"),)}
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
        with pytest.raises(SamplingError, match="there is no method singing"):
            asked.ask("singing")


@pytest.fixture
def joining(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRay]:
    """Ray, which puts a handler of its own in place when it is joined."""
    plain, before = ray.init, signal.getsignal(signal.SIGTERM)

    def leave(*_: object) -> None:
        raise SystemExit(1)

    def init(**settings: object) -> None:
        signal.signal(signal.SIGTERM, leave)
        plain(**settings)

    monkeypatch.setattr(ray, "init", init)
    yield ray
    signal.signal(signal.SIGTERM, before)


def test_own_sigterm_handler_is_kept(joining: FakeRay) -> None:
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    with connected(joining, placement(), [{"CPU": 1.0}]):
        os.kill(os.getpid(), signal.SIGTERM)
        assert told == [signal.SIGTERM]


def test_ray_handles_sigterm_by_default(joining: FakeRay) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with connected(joining, placement(), [{"CPU": 1.0}]), pytest.raises(SystemExit):
        os.kill(os.getpid(), signal.SIGTERM)


Placed = Callable[..., Components]
PARAMS = SamplingParams(temperature=1.0, max_new_tokens=6, num_samples=2)


@pytest.fixture
def placed(ray: FakeRay, make_components: MakeComponents, start: Path) -> Iterator[Placed]:
    """Opens the components of a run on a cluster that is none."""
    opened = []

    def open_placed(log: Callable[[str], None] = print, **settings: int) -> Components:
        opened.append(placed_components(make_components(config=SETTINGS), start, placement(**settings), log))
        return opened[-1].__enter__()

    yield open_placed
    for each in opened:
        each.__exit__(None, None, None)


def samplers(ray: FakeRay) -> list[Actor]:
    return [actor for actor in ray.actors if actor.arguments[0] == "sampler"]


def tokens(groups: Any) -> list[tuple[int, ...]]:
    return [each.completion_ids for group in groups for each in group]


def test_run_on_cluster_equals_one_process(
    ray: FakeRay, placed: Placed, make_components: MakeComponents, start: Path
) -> None:
    here = make_components(config=SETTINGS, folder="here")
    own = native_components(start, here.config, prompts=here.prompts, reward=here.reward, folder=here.folder)
    theirs = placed(samplers=1)
    reward = of_this_process(theirs.reward)
    expected = train(dataclasses.replace(own, reward=reward), Tape())
    found = train(theirs, Tape())
    for ours, row in zip(expected.history, found.history, strict=True):
        for name in ("reward/mean", "loss/policy", "gradient_norm", "completion/length"):
            assert row[name] == pytest.approx(ours[name], rel=1e-3, abs=1e-5)


def of_this_process(reward: WeightedReward) -> WeightedReward:
    return WeightedReward([dataclasses.replace(part, reward=unwrap_reward(part.reward)) for part in reward.terms])


def test_replaced_sampler_reloads_weights(ray: FakeRay, placed: Placed) -> None:
    notes: list[str] = []
    components = placed(notes.append)
    components.learner.update(strategies.random_samples(0), seed=0)
    weights = components.learner.weights()
    components.engine.load_weights(weights, policy_version=1)
    before = tokens(components.engine.sample(components.prompts, PARAMS, seed=3))
    samplers(ray)[1].dies = True
    assert tokens(components.engine.sample(components.prompts, PARAMS, seed=3)) == before
    assert notes == ["sampler 1 was replaced: reload policy_version=1 and retry"]
    assert [member.policy_version for member in replicas_of(components.engine)] == [1, 1]
    assert replicas_of(components.engine)[1].differing_parts(weights) == []


def test_replaced_sampler_reports_reloaded_version(ray: FakeRay, placed: Placed) -> None:
    components = placed(samplers=1)
    weights = components.learner.weights()
    assert isinstance(weights, RemoteWeights) and len(weights) == len({*weights})
    components.engine.load_weights(weights, policy_version=5)
    for ask in (
        lambda: components.engine.policy_version,
        lambda: components.engine.differing_parts(weights),
        lambda: components.engine.logprobs((3, 4), (5,), temperature=1.0),
    ):
        samplers(ray)[0].dies = True
        ask()
        assert components.engine.policy_version == 5
        samplers(ray)[0].left = 3


def test_sampler_lost_too_often_ends_run(ray: FakeRay, placed: Placed) -> None:
    components = placed(max_restarts=0)
    samplers(ray)[0].dies = True
    with pytest.raises(SamplingError, match=r"sampler 0 is gone, in 'sample'(.|\n)*resumes from the newest checkpoint"):
        components.engine.sample(components.prompts, PARAMS, seed=0)


def test_error_of_sampler_is_raised(ray: FakeRay, placed: Placed) -> None:
    components = placed(samplers=1)
    weights = components.learner.weights()
    assert isinstance(weights, RemoteWeights)
    del weights._tensors["model.norm.weight"]
    weights.blob.reference.made[:] = [save({name: tensor.clone() for name, tensor in weights.items()})]
    with pytest.raises(SamplingError, match="do not fit the engine's model"):
        components.engine.load_weights(weights, policy_version=1)
    assert components.engine.policy_version == 0


def rollout(components: Components, *ids: int) -> Rollout:
    return Rollout(
        prompt=components.prompts[0],
        completion_ids=ids,
        sampler_logprobs=(0.0,) * len(ids),
        loss_mask=(True,) * len(ids),
        policy_version=0,
        finish_reason="stop",
        text="",
    )


@pytest.mark.parametrize("count", [0, 1, 7, 40])
def test_scores_keep_order_of_rollouts(count: int, ray: FakeRay, placed: Placed) -> None:
    components = placed(scorers=2)
    asked = [rollout(components, *range(number + 1)) for number in range(count)]
    dying = next(actor for actor in ray.actors if actor.arguments[0] == "scorer")
    dying.dies = True
    assert [score.value for score in components.reward(asked)] == even(asked)
    (part,) = components.reward.terms
    assert part.reward.name == "even"


def test_lost_rank_is_named(ray: FakeRay, placed: Placed, tmp_path: Path) -> None:
    learner = placed().learner
    ray.actors[-1].replace(may=False)
    with pytest.raises(LearnerLostError, match=r"rank 0 is gone \(The actor is dead because its worker"):
        learner.observe_kl(0.1, 3)
    assert learner.load(tmp_path, identity={}) is None
    assert learner.policy_version == 0


class Killer(Tape):
    """Kills a sampler when the first iteration is recorded, and the rank when the third is, for the first time."""

    def __init__(self, ray: FakeRay) -> None:
        super().__init__()
        self._ray, self._killed = ray, set[int]()

    def metrics(self, iteration: int, metrics: Any) -> None:
        super().metrics(iteration, metrics)
        if iteration == 1:
            samplers(self._ray)[-1].dies = True
        if iteration == 3 and not self._killed:
            self._killed.add(iteration)
            [each for each in self._ray.actors if each.arguments[0] == "rank"][-1].replace(may=False)


@pytest.mark.parametrize("staleness", [1, pytest.param(2, marks=pytest.mark.scale)])
def test_staleness_survives_lost_processes(
    staleness: int, ray: FakeRay, make_components: MakeComponents, start: Path
) -> None:
    config = SETTINGS | {"sampling": SamplingConfig(max_new_tokens=8, staleness=staleness)}
    found, said = [], list[str]()
    for tape in (Tape(), Killer(ray)):
        components = make_components(config=config, folder=type(tape).__name__)
        with placed_components(components, start, placement(), said.append) as components:
            train(components, tape)
            found.append({name: tensor.clone() for name, tensor in components.learner.weights().items()})
        said += tape.notes
    numbers = [int(row["iteration"]) for row in tape.rows]
    assert numbers == [1, 2, 3, 3, 4]  # the third was recorded and not yet saved when the rank died
    for number, drawn in zip(numbers, tape.drawn, strict=True):
        rollouts = [each.rollout for group in drawn.groups for each in group]
        assert {each.policy_version for each in rollouts} == {max(0, number - 1 - staleness)}
        assert {*Counter(each.prompt.prompt_id for each in rollouts).values()} == {SETTINGS["group_size"]}
    assert samplers(ray)[-1].left == placement().max_restarts - 1 and any("rank 0 is gone" in each for each in said)
    assert all(torch.equal(found[1][name], tensor) for name, tensor in found[0].items())

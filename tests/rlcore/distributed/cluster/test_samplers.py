"""Samplers and scorers on a cluster: one that dies is replaced, and what it was asked is computed once more, once."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from rlcore.config import SamplingConfig
from rlcore.distributed.cluster.remote_ranks import RemoteWeights
from rlcore.errors import LearnerLostError, SamplingError
from rlcore.loop import Components, train
from rlcore.loop.native import native_components
from rlcore.rewards.base import unwrap_reward
from rlcore.rewards.mix import WeightedReward
from rlcore.sampling.base import SamplingParams, replicas_of
from rlcore.types import Rollout
from tests import strategies
from tests.rlcore.distributed.cluster.fake_ray import Actor, FakeRay
from tests.rlcore.distributed.cluster.placed import SETTINGS, placed_components, placement
from tests.rlcore.distributed.cluster.scoring import even
from tests.rlcore.loop.conftest import MakeComponents, Tape

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


def test_a_run_on_a_cluster_is_that_of_one_process(
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


def test_a_sampler_that_dies_gets_the_newest_weights_before_it_samples_again(ray: FakeRay, placed: Placed) -> None:
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


def test_a_sampler_that_was_replaced_is_asked_for_its_version_and_its_weights_only_when_it_has_them(
    ray: FakeRay, placed: Placed
) -> None:
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


def test_a_sampler_that_dies_too_often_ends_the_run(ray: FakeRay, placed: Placed) -> None:
    components = placed(max_restarts=0)
    samplers(ray)[0].dies = True
    with pytest.raises(SamplingError, match=r"sampler 0 is gone, in 'sample'(.|\n)*resumes from the newest checkpoint"):
        components.engine.sample(components.prompts, PARAMS, seed=0)


def test_what_a_sampler_refuses_is_raised_here(ray: FakeRay, placed: Placed) -> None:
    components = placed(samplers=1)
    weights = components.learner.weights()
    assert isinstance(weights, RemoteWeights)
    del weights._tensors[next(iter(weights))]
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
def test_scores_come_back_in_the_order_of_the_rollouts_whoever_computes_them(
    count: int, ray: FakeRay, placed: Placed
) -> None:
    components = placed(scorers=2)
    asked = [rollout(components, *range(number + 1)) for number in range(count)]
    dying = next(actor for actor in ray.actors if actor.arguments[0] == "scorer")
    dying.dies = True
    assert [score.value for score in components.reward(asked)] == even(asked)
    (part,) = components.reward.terms
    assert part.reward.name == "even"


def test_a_rank_that_is_gone_is_named_and_the_next_ones_hold_the_newest_checkpoint(
    ray: FakeRay, placed: Placed, tmp_path: Path
) -> None:
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
def test_rollouts_ahead_are_as_old_as_was_decided_whatever_dies(
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

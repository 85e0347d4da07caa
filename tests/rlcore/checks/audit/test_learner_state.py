"""Numbers that control an update are recomputed: from the samples, the rewards, and the configuration."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlcore.algorithms.kl import k3
from rlcore.algorithms.ratios import clamped_difference
from rlcore.checks.audit.learner_state import arrival_errors, epoch_errors, kl_sums, mean_kl, measure_error
from rlcore.checks.audit.prompt_checks import replacement_errors, row_errors, version_errors
from rlcore.config import KlConfig, RlConfig, SamplingConfig, UpdateConfig
from rlcore.loop.prompt_schedule import interleave, replace_groups, unused_prompts
from rlcore.training.minibatches import split_by_group
from rlcore.training.sample_digests import digest, digest_of
from rlcore.training.update_stats import UpdateStats
from rlcore.types import Prompt, ScoredRollout
from tests import strategies

SAMPLES = strategies.random_samples(3)
LIMITED = UpdateConfig(num_epochs=3, early_stop_kl=0.1, early_stop_ref_kl=0.5)


def test_the_audits_kl_is_that_of_the_formula() -> None:
    logprobs, old, ref = -torch.rand(3, 6, generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([True, False, True, True, False, True])
    count, from_old, to_ref = map(float, kl_sums(logprobs, old, ref, mask))
    assert count == 4.0
    assert from_old == pytest.approx(float(k3(clamped_difference(old, logprobs, mask)).sum()), rel=1e-5)
    assert to_ref == pytest.approx(float(k3(clamped_difference(logprobs, ref, mask)).sum()), rel=1e-5)


@pytest.mark.parametrize("apply_to", ["reward", "loss"])
def test_the_kl_that_a_coefficient_follows_is_per_episode(apply_to: Any) -> None:
    config = strategies.rl_config(kl=KlConfig(coefficient=0.1, apply_to=apply_to))
    masks = [sample.loss_mask for sample in SAMPLES]
    gaps = [(each.old_logprobs - each.ref_logprobs)[each.loss_mask].sum() for each in SAMPLES]
    in_loss = 0.02 * sum(int(mask.sum()) for mask in masks) / len(SAMPLES)
    expected = in_loss if apply_to == "loss" else float(sum(gaps)) / len(SAMPLES)
    found = mean_kl(SAMPLES, {"kl/ref": 0.02} if apply_to == "loss" else {}, config)
    assert found == pytest.approx(expected, abs=1e-9)
    assert list(measure_error("the KL", expected, found)) == []
    (error,) = measure_error("the KL", expected / 12.0, found)
    assert str(error).startswith("the KL: expected")


def stats_of(epochs: int, *kl: tuple[float, float, float]) -> UpdateStats:
    return UpdateStats(policy_version=1, moved=True, metrics={}, arrived=((("",),) * epochs,), epoch_kl=kl)


LOW, OLD, REF, NEAR = (10.0, 0.5, 1.0), (10.0, 1.2, 1.0), (10.0, 0.5, 6.0), (10.0, 1.00005, 1.0)


@pytest.mark.parametrize(
    ("done", "kl", "expected"),
    [
        (3, (LOW, LOW, OLD), ""),
        (2, (LOW, OLD), ""),
        (1, (REF,), ""),
        (2, (LOW, NEAR), ""),  # rounding decides
        (3, (LOW, NEAR, LOW), ""),
        (1, (LOW,), "more than 1 of 3, found 1"),
        (3, (LOW, OLD, LOW), "expected 2, found 3"),
        (2, (REF, LOW), "expected 1, found 2"),
        (1, (), "more than 1 of 3, found 1"),  # nothing was measured
    ],
)
def test_an_update_ends_with_the_first_epoch_over_a_limit_or_the_last(
    done: int, kl: tuple[tuple[float, float, float], ...], expected: str
) -> None:
    found = [str(error) for error in epoch_errors(stats_of(done, *kl), LIMITED)]
    assert len(found) == bool(expected)
    assert expected in "".join(found)


def test_without_a_limit_every_epoch_is_done() -> None:
    assert list(epoch_errors(stats_of(2), UpdateConfig(num_epochs=2))) == []
    (error,) = epoch_errors(stats_of(1), UpdateConfig(num_epochs=2))
    assert "no limit is set: expected more than 1 of 2, found 1" in str(error)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_minibatches_are_those_of_each_epochs_own_shuffle(count: int) -> None:
    samples = [dataclasses.replace(each, group=number // 2) for number, each in enumerate(SAMPLES * 2)]
    update, digests = (
        UpdateConfig(num_epochs=3, num_minibatches=count),
        [(each.group, digest(each)) for each in samples],
    )

    def errors(*epochs: int) -> list[str]:
        batches = [split_by_group(samples, count, seed=5, epoch=epoch) for epoch in epochs]
        arrived = ((tuple(tuple(map(digest_of, each)) for each in batches)),)
        stats = UpdateStats(policy_version=1, moved=True, metrics={}, arrived=arrived)
        return [str(error) for error in arrival_errors(stats, digests, update, seed=5)]

    assert errors(0, 1, 2) == []
    if count > 1:
        assert "of epoch 2 are not" in errors(0, 0, 2)[0]


def prompts(count: int) -> list[Prompt]:
    return [
        Prompt(prompt_id=f"p{n}", messages=(), token_ids=(n,), reference=str(n), task="t", dataset="ab"[n % 2])
        for n in range(count)
    ]


def group(prompt: Prompt, *rewards: float) -> list[ScoredRollout]:
    made = [strategies.scored_rollout(value) for value in rewards]
    return [dataclasses.replace(each, rollout=dataclasses.replace(each.rollout, prompt=prompt)) for each in made]


def dynamic(config: RlConfig, weights: dict[str, float]) -> Any:
    return SimpleNamespace(config=config, prompts=prompts(12), mixture_weights=weights, seed=3)


@pytest.mark.parametrize("weights", [{}, {"a": 2.0, "b": 1.0}])
@pytest.mark.parametrize("equal", [{"p0", "p2"}, {f"p{n}" for n in range(9)}, set()])
def test_every_round_of_dynamic_sampling_is_recomputed(equal: set[str], weights: dict[str, float]) -> None:
    config = strategies.rl_config("dapo", sampling=SamplingConfig(max_new_tokens=8, dynamic_sampling_rounds=2))
    components, scheduled = dynamic(config, weights), prompts(4)
    unused = unused_prompts(components.prompts, {each.prompt_id for each in scheduled}, seed=3, iteration=7)
    fresh = interleave(unused, weights) if weights else iter(unused)

    def drawn(chosen: list[Prompt]) -> list[list[ScoredRollout]]:
        return [group(each, 1.0, 1.0 if each.prompt_id in equal else 0.0) for each in chosen]

    def has_signal(made: list[ScoredRollout]) -> bool:
        return made[0].score.value != made[1].score.value

    made = replace_groups(
        drawn(scheduled), lambda _, count: drawn([next(fresh) for _ in range(count)]), has_signal, max_rounds=2
    )

    def errors(groups: Any, replaced: Any) -> list[str]:
        return [str(each) for each in replacement_errors(components, groups, replaced, scheduled, iteration=7)]

    assert errors(made.groups, made.replaced) == []
    if made.replaced:
        assert errors(drawn(scheduled), ()) != []  # groups without a signal stayed
        assert errors(made.groups, made.replaced[1:]) != []
    if len(made.replaced) < 4:
        kept = next(n for n, each in enumerate(made.groups) if each[0].rollout.prompt in scheduled)
        others = [*made.groups[:kept], drawn([next(fresh)])[0], *made.groups[kept + 1 :]]
        assert errors(others, (*made.replaced, made.groups[kept])) != []  # a group with a signal was dropped


def test_a_rollout_with_the_reference_of_another_prompt_is_named() -> None:
    rows = {each.prompt_id: each for each in prompts(3)}
    assert list(row_errors([group(each, 1.0) for each in rows.values()], rows)) == []
    moved = dataclasses.replace(rows["p1"], reference="2")
    (error,) = row_errors([group(moved, 1.0)], rows)
    assert str(error) == "the reference of prompt 'p1': expected '1', found '2'"


@pytest.mark.parametrize(("iteration", "staleness", "wanted"), [(1, 0, 0), (4, 0, 3), (2, 2, 0), (5, 2, 2)])
def test_rollouts_are_as_old_as_the_staleness_allows(iteration: int, staleness: int, wanted: int) -> None:
    (item,) = group(prompts(1)[0], 1.0)
    for version in range(5):
        aged = dataclasses.replace(item, rollout=dataclasses.replace(item.rollout, policy_version=version))
        assert bool(list(version_errors([[aged]], iteration, staleness=staleness))) == (version != wanted)


def test_a_measure_that_is_not_a_number_is_an_error() -> None:
    assert list(measure_error("the KL", math.nan, 0.1))

"""Minibatches, their loss and their metrics."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from rlcore.algorithms.objective import LossOutput
from rlcore.errors import CanaryError, NonFiniteError
from rlcore.hardware.sharded import ONE, Ranks
from rlcore.training.learner import Learner
from rlcore.training.minibatches import (
    digest_of,
    require_finite,
    require_same,
    split_by_group,
)
from rlcore.training.update_stats import StatAccumulator
from rlcore.types import TrainingSample
from tests import strategies
from tests.learners import make_learner, update_config
from tests.ranks import on_ranks


def test_every_group_is_whole_in_one_minibatch() -> None:
    samples = strategies.random_samples(0, num_prompts=5, group_size=3)
    dealt = split_by_group(samples, 2, seed=0, epoch=0)
    assert sorted(map(len, dealt)) == [6, 9]
    prompts = [{sample.prompt_ids for sample in minibatch} for minibatch in dealt]
    assert not prompts[0] & prompts[1]
    assert sorted(id(sample) for minibatch in dealt for sample in minibatch) == sorted(map(id, samples))


def test_order_depends_on_seed_and_epoch() -> None:
    samples = strategies.random_samples(0, num_prompts=6, group_size=1)
    assert split_by_group(samples, 2, seed=0, epoch=1) == split_by_group(samples, 2, seed=0, epoch=1)
    assert split_by_group(samples, 2, seed=0, epoch=1) != split_by_group(samples, 2, seed=0, epoch=2)
    assert split_by_group(samples, 2, seed=0, epoch=1) != split_by_group(samples, 2, seed=1, epoch=1)
    assert [len(minibatch) for minibatch in split_by_group(samples, 99, seed=0, epoch=0)] == [1] * 6


@pytest.mark.parametrize(
    "field", ["sampler_logprobs", "old_logprobs", "ref_logprobs", "advantages", "values", "returns"]
)
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_non_finite_number_is_named(field: str, number: float) -> None:
    samples = strategies.random_samples(0, num_prompts=2, group_size=2)
    wrong = getattr(samples[2], field).clone()
    wrong[-1] = number  # the last token is always the policy's own
    samples[2] = dataclasses.replace(samples[2], **{field: wrong})
    with pytest.raises(NonFiniteError, match=field) as caught:
        require_finite(samples)
    assert "sample 2 " in str(caught.value)


def micro_output(num_tokens: int, loss: float = 0.0, **sums: float) -> LossOutput:
    named = {"kl/old": 0.0, "clip/low": 0.0, "clip/high": 0.0, "mismatch/weight": 1.0, "mismatch/weight_squared": 1.0}
    named |= {name.replace("__", "/"): value for name, value in sums.items()}
    return LossOutput(
        loss=torch.tensor(loss),
        sums={name: torch.tensor(value) for name, value in named.items()},
        maxima={"mismatch/max_abs": torch.tensor(float(num_tokens))},
        num_tokens=torch.tensor(num_tokens),
    )


def test_means_are_over_tokens() -> None:
    # 6 over 2 tokens and 0 over 4: the mean is 1, while the mean of means would be 1.5.
    totals = StatAccumulator()
    totals.add(micro_output(2, kl__old=6.0))
    totals.add(micro_output(4, kl__old=0.0))
    assert totals.means()["kl/old"] == 1.0
    assert totals.means()["mismatch/max_abs"] == 4.0


def test_losses_are_averaged_over_steps() -> None:
    totals = StatAccumulator()
    for _ in range(2):  # two steps of two micro-batches
        totals.add(micro_output(1, loss=0.25))
        totals.add(micro_output(1, loss=0.5))
        totals.record("gradient_norm", 3.0)
    totals.record("gradient_norm", 9.0)
    assert totals.means()["loss/policy"] == pytest.approx(1.5 / 3)
    assert totals.means()["gradient_norm"] == 5.0


def test_effective_sample_size_by_hand() -> None:
    # Weights 1 and 2: (1 + 2)^2 / (2 * (1 + 4)) = 0.9.
    totals = StatAccumulator()
    totals.add(micro_output(2, mismatch__weight=3.0, mismatch__weight_squared=5.0))
    means = totals.means()
    assert means["mismatch/ess"] == pytest.approx(0.9)
    assert not {"mismatch/weight", "mismatch/weight_squared"} & means.keys()


def test_clip_fraction_is_sum_of_sides() -> None:
    totals = StatAccumulator()
    totals.add(micro_output(10, clip__low=1.0, clip__high=2.0))
    assert totals.means()["clip/fraction"] == pytest.approx(0.3)


def test_epoch_mean() -> None:
    totals = StatAccumulator()
    totals.add(micro_output(2, kl__old=2.0))
    totals.begin_epoch()
    assert totals.epoch_mean("kl/old") == 0.0
    totals.add(micro_output(4, kl__old=12.0))
    assert totals.epoch_mean("kl/old") == 3.0


def test_no_tokens_have_no_metrics() -> None:
    assert StatAccumulator().means() == {}


TENSORS = ("loss_mask", "sampler_logprobs", "old_logprobs", "ref_logprobs", "advantages", "values", "returns")


def test_digest_covers_every_number() -> None:
    samples = strategies.random_samples(1)
    assert digest_of(samples) == digest_of(samples[::-1])
    assert digest_of(samples) != digest_of(samples[1:])
    for name in TENSORS:
        column = getattr(samples[0], name).clone()
        column[-1] = ~column[-1] if column.dtype == torch.bool else column[-1] + 1e-6
        changed: dict[str, Any] = {name: column}
        assert digest_of([dataclasses.replace(samples[0], **changed), *samples[1:]]) != digest_of(samples)
    others: tuple[dict[str, Any], ...] = ({"prompt_ids": (*samples[0].prompt_ids, 1)}, {"episode": 9}, {"group": 9})
    for other in others:
        assert digest_of([dataclasses.replace(samples[0], **other), *samples[1:]]) != digest_of(samples)


@pytest.mark.parametrize(
    "settings", [{}, {"num_epochs": 2, "num_minibatches": 2}, {"num_epochs": 3, "tokens_per_microbatch": 16}]
)
def test_update_reports_digests_of_minibatches(settings: dict[str, Any]) -> None:
    samples = strategies.random_samples(2)
    learner = make_learner("ppo", update=update_config(**settings))
    (epochs,) = learner.update(samples, seed=0).arrived
    count = settings.get("num_minibatches", 1)
    expected = [
        tuple(digest_of(batch) for batch in split_by_group(samples, count, seed=0, epoch=epoch))
        for epoch in range(settings.get("num_epochs", 1))
    ]
    assert list(epochs) == expected


def test_digests_reveal_changed_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    def negated(self: Learner, samples: Any, *rest: Any) -> Any:
        return accumulate(self, [dataclasses.replace(each, advantages=-each.advantages) for each in samples], *rest)

    accumulate = Learner._accumulate
    monkeypatch.setattr(Learner, "_accumulate", negated)
    samples = strategies.random_samples(2)
    assert make_learner("grpo").update(samples, seed=0).arrived != (((digest_of(samples),),),)


def test_ranks_with_different_samples_fail(tmp_path: Path) -> None:
    def told(ranks: Ranks) -> str:
        samples: list[TrainingSample] = strategies.random_samples(ranks.rank)
        try:
            require_same(samples, ranks)
        except CanaryError as error:
            return error.what
        return ""

    assert on_ranks(2, told, tmp_path) == ["rank 1 received other samples than rank 0"] * 2
    require_same(strategies.random_samples(0), ONE)

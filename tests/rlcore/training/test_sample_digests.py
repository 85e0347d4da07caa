"""A digest of samples knows every bit of them, and not their order."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from rlcore.distributed.ranks import ONE, Ranks
from rlcore.errors import CanaryError
from rlcore.training.learner import Learner
from rlcore.training.minibatches import split_by_group
from rlcore.training.sample_digests import digest_of, require_same
from rlcore.types import TrainingSample
from tests import strategies
from tests.learners import make_learner, update_config
from tests.ranks import on_ranks

TENSORS = ("loss_mask", "sampler_logprobs", "old_logprobs", "ref_logprobs", "advantages", "values", "returns")


def test_the_order_of_samples_does_not_matter_and_each_number_does() -> None:
    samples = strategies.random_samples(1)
    assert digest_of(samples) == digest_of(samples[::-1])
    assert digest_of(samples) != digest_of(samples[1:])
    for name in TENSORS:
        column = getattr(samples[0], name).clone()
        column[-1] = ~column[-1] if column.dtype == torch.bool else column[-1] + 1e-6
        changed: dict[str, Any] = {name: column}
        assert digest_of([dataclasses.replace(samples[0], **changed), *samples[1:]]) != digest_of(samples)
    longer = dataclasses.replace(samples[0], prompt_ids=(*samples[0].prompt_ids, 1))
    assert digest_of([longer, *samples[1:]]) != digest_of(samples)


@pytest.mark.parametrize(
    "settings", [{}, {"num_epochs": 2, "num_minibatches": 2}, {"num_epochs": 3, "tokens_per_microbatch": 16}]
)
def test_each_epoch_of_an_update_says_what_its_minibatches_were(settings: dict[str, Any]) -> None:
    samples = strategies.random_samples(2)
    learner = make_learner("ppo", update=update_config(**settings))
    (epochs,) = learner.update(samples, seed=0).arrived
    count = settings.get("num_minibatches", 1)
    expected = [
        tuple(digest_of(batch) for batch in split_by_group(samples, count, seed=0, epoch=epoch))
        for epoch in range(settings.get("num_epochs", 1))
    ]
    assert list(epochs) == expected


def test_samples_that_an_update_was_given_and_has_not_learned_from_show(monkeypatch: pytest.MonkeyPatch) -> None:
    def negated(self: Learner, samples: Any, *rest: Any) -> Any:
        return accumulate(self, [dataclasses.replace(each, advantages=-each.advantages) for each in samples], *rest)

    accumulate = Learner._accumulate
    monkeypatch.setattr(Learner, "_accumulate", negated)
    samples = strategies.random_samples(2)
    assert make_learner("grpo").update(samples, seed=0).arrived != (((digest_of(samples),),),)


def test_ranks_that_are_given_different_samples_say_so_before_a_step(tmp_path: Path) -> None:
    def told(ranks: Ranks) -> str:
        samples: list[TrainingSample] = strategies.random_samples(ranks.rank)
        try:
            require_same(samples, ranks)
        except CanaryError as error:
            return error.what
        return ""

    assert on_ranks(2, told, tmp_path) == ["rank 1 received other samples than rank 0"] * 2
    require_same(strategies.random_samples(0), ONE)

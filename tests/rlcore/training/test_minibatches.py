"""Samples dealt into minibatches, and the flat per-token fields of a micro-batch of them."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from rlcore.algorithms.table import ALGORITHMS
from rlcore.errors import NonFiniteError
from rlcore.text.packing import pack
from rlcore.training.minibatches import (
    Columns,
    num_policy_tokens,
    require_finite,
    split_by_group,
    token_sequences,
    token_weights,
)
from rlcore.types import TrainingSample
from tests import strategies


def test_every_group_is_in_exactly_one_minibatch_and_whole() -> None:
    samples = strategies.random_samples(0, num_prompts=5, group_size=3)
    dealt = split_by_group(samples, 2, seed=0, epoch=0)
    assert sorted(map(len, dealt)) == [6, 9]
    prompts = [{sample.prompt_ids for sample in minibatch} for minibatch in dealt]
    assert not prompts[0] & prompts[1]
    assert sorted(id(sample) for minibatch in dealt for sample in minibatch) == sorted(map(id, samples))


def test_the_order_is_a_function_of_seed_and_epoch_and_there_is_no_empty_minibatch() -> None:
    samples = strategies.random_samples(0, num_prompts=6, group_size=1)
    assert split_by_group(samples, 2, seed=0, epoch=1) == split_by_group(samples, 2, seed=0, epoch=1)
    assert split_by_group(samples, 2, seed=0, epoch=1) != split_by_group(samples, 2, seed=0, epoch=2)
    assert split_by_group(samples, 2, seed=0, epoch=1) != split_by_group(samples, 2, seed=1, epoch=1)
    assert [len(minibatch) for minibatch in split_by_group(samples, 99, seed=0, epoch=0)] == [1] * 6


def sample_of(mask: list[bool], episode: int) -> TrainingSample:
    """A sample of which nothing but the mask is looked at."""
    zeros = torch.zeros(len(mask))
    names = ("sampler_logprobs", "old_logprobs", "ref_logprobs", "advantages", "values", "returns")
    return TrainingSample(
        episode=episode,
        group=0,
        prompt_ids=(1,),
        completion_ids=(3,) * len(mask),
        loss_mask=torch.tensor(mask),
        **dict.fromkeys(names, zeros),
    )


def test_the_weights_of_a_step_are_those_of_its_padded_mask_cut_to_each_completion() -> None:
    # Two completions of 2 and 4 tokens, the second with one that is not the policy's: GRPO gives 1 / (2 * own tokens).
    samples = [sample_of([True, True], 0), sample_of([True, False, True, True], 1)]
    weights = token_weights(ALGORITHMS["grpo"], samples)
    assert [weight.tolist() for weight in weights] == [
        pytest.approx([1 / 4, 1 / 4]),
        pytest.approx([1 / 6, 0.0, 1 / 6, 1 / 6]),
    ]
    assert num_policy_tokens(samples) == 5


def test_columns_stand_in_the_order_of_the_batch_s_targets() -> None:
    samples = strategies.random_samples(3, num_prompts=3, group_size=2)
    weights = [torch.full((len(sample.completion_ids),), float(number)) for number, sample in enumerate(samples)]
    (batch,) = pack(token_sequences(samples), tokens_per_microbatch=10_000)
    columns = Columns(samples, weights, batch)
    assert batch.sequence_index.tolist() != sorted(batch.sequence_index.tolist())  # packing has changed the order
    assert columns.weights.tolist() == batch.sequence_index.tolist()
    own = [
        float(samples[sequence].returns[token])
        for sequence, token in zip(batch.sequence_index.tolist(), batch.token_index.tolist(), strict=True)
    ]
    assert columns.get("returns").tolist() == own
    assert columns.get("loss_mask").dtype == torch.bool


@pytest.mark.parametrize(
    "field", ["sampler_logprobs", "old_logprobs", "ref_logprobs", "advantages", "values", "returns"]
)
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_named_where_it_trains(field: str, number: float) -> None:
    samples = strategies.random_samples(0, num_prompts=2, group_size=2)
    wrong = getattr(samples[2], field).clone()
    wrong[-1] = number  # the last token is always the policy's own
    samples[2] = dataclasses.replace(samples[2], **{field: wrong})
    with pytest.raises(NonFiniteError, match=field) as caught:
        require_finite(samples)
    assert "sample 2 " in str(caught.value)


def test_what_is_not_trained_on_may_be_anything() -> None:
    (sample,) = strategies.random_samples(0, num_prompts=1, group_size=1, max_tokens=1)
    nothing = torch.full((1,), math.nan, dtype=torch.float64)
    require_finite([dataclasses.replace(sample, loss_mask=torch.tensor([False]), advantages=nothing)])

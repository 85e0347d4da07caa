from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlcore.algorithms.weighting import WeightingFn, constant, sequence_mean, sequence_sum, token_mean
from tests import strategies

ONE_EACH = torch.arange(3)
MASK = torch.tensor([[True, True, True, True], [True, False, False, False], [False, False, False, False]])


def test_token_mean_counts_every_token_the_same() -> None:
    # 4 + 1 + 0 tokens: each counts 1/5.
    expected = torch.tensor([[0.2, 0.2, 0.2, 0.2], [0.2, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    assert torch.equal(token_mean(MASK, ONE_EACH), expected)


def test_sequence_mean_counts_every_sequence_that_has_tokens_the_same() -> None:
    # Two sequences have tokens: 1/2 spread over 4 tokens is 0.125 each, 1/2 on one token is 0.5. The third, masked as a
    # whole, is in neither numerator nor denominator.
    assert sequence_mean(MASK, ONE_EACH).tolist() == [[0.125] * 4, [0.5, 0, 0, 0], [0] * 4]


def test_sequence_sum_counts_every_token_of_every_sequence_that_has_tokens() -> None:
    assert sequence_sum(MASK, ONE_EACH).tolist() == [[0.5] * 4, [0.5, 0, 0, 0], [0] * 4]


def test_constant_divides_by_a_fixed_length() -> None:
    # Two sequences with tokens, length 8: each token counts 1/16, whatever the sequence's own length is.
    assert constant(MASK, ONE_EACH, constant_length=8).tolist() == [[0.0625] * 4, [0.0625, 0, 0, 0], [0] * 4]


@pytest.mark.parametrize("function", [token_mean, sequence_mean, partial(constant, constant_length=5)])
@given(mask=strategies.masks(), data=st.data())
def test_weights_are_zero_exactly_where_masked_and_never_negative(
    function: WeightingFn, mask: torch.Tensor, data: st.DataObject
) -> None:
    weights = function(mask, torch.tensor([data.draw(st.integers(0, 2)) for _ in mask]))
    assert bool((weights[~mask] == 0).all())
    assert bool((weights[mask] > 0).all())


@pytest.mark.parametrize("function", [token_mean, sequence_mean, partial(constant, constant_length=5)])
def test_a_step_without_any_token_has_weights_of_zero(function: WeightingFn) -> None:
    assert function(torch.zeros(2, 3, dtype=torch.bool), torch.arange(2)).tolist() == [[0.0] * 3] * 2


def test_an_episode_of_four_samples_weighs_as_much_as_one_of_one_sample() -> None:
    # Episode 7 has 4 + 1 + 1 + 2 = 8 tokens in four samples, the others 2 each in one. A quarter each: 1/32 per token
    # of the first, 1/8 per token of the others.
    lengths, episode = [4, 1, 1, 2, 2, 2, 2], torch.tensor([7, 7, 7, 7, 3, 1, 9])
    mask = torch.arange(4) < torch.tensor(lengths)[:, None]
    by_sequence = sequence_mean(mask, episode)
    assert by_sequence[:4].sum() == 0.25
    assert by_sequence.max(1).values.tolist() == [1 / 32] * 4 + [1 / 8] * 3
    assert sequence_sum(mask, episode).max(1).values.tolist() == [1 / 4] * 7
    assert constant(mask, episode, constant_length=8).max(1).values.tolist() == [1 / 32] * 7
    assert token_mean(mask, episode).max(1).values.tolist() == pytest.approx([1 / 14] * 7)

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given

from rlcore.algorithms.weighting import WeightingFn, constant, sequence_mean, sequence_sum, token_mean
from tests import strategies

MASK = torch.tensor([[True, True, True, True], [True, False, False, False], [False, False, False, False]])


def test_token_mean_counts_every_token_the_same() -> None:
    # 4 + 1 + 0 tokens: each counts 1/5.
    expected = torch.tensor([[0.2, 0.2, 0.2, 0.2], [0.2, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    assert torch.equal(token_mean(MASK), expected)


def test_sequence_mean_counts_every_sequence_that_has_tokens_the_same() -> None:
    # Two sequences have tokens: 1/2 spread over 4 tokens is 0.125 each, 1/2 on one token is 0.5. The third, masked as a
    # whole, is in neither numerator nor denominator.
    assert sequence_mean(MASK).tolist() == [[0.125] * 4, [0.5, 0, 0, 0], [0] * 4]


def test_sequence_sum_counts_every_token_of_every_sequence_that_has_tokens() -> None:
    assert sequence_sum(MASK).tolist() == [[0.5] * 4, [0.5, 0, 0, 0], [0] * 4]


def test_constant_divides_by_a_fixed_length() -> None:
    # Two sequences with tokens, length 8: each token counts 1/16, whatever the sequence's own length is.
    assert constant(MASK, constant_length=8).tolist() == [[0.0625] * 4, [0.0625, 0, 0, 0], [0] * 4]


@pytest.mark.parametrize("function", [token_mean, sequence_mean, partial(constant, constant_length=5)])
@given(mask=strategies.masks())
def test_weights_are_zero_exactly_where_masked_and_never_negative(function: WeightingFn, mask: torch.Tensor) -> None:
    weights = function(mask)
    assert bool((weights[~mask] == 0).all())
    assert bool((weights[mask] > 0).all())


@pytest.mark.parametrize("function", [token_mean, sequence_mean, partial(constant, constant_length=5)])
def test_a_step_without_any_token_has_weights_of_zero(function: WeightingFn) -> None:
    assert function(torch.zeros(2, 3, dtype=torch.bool)).tolist() == [[0.0] * 3] * 2

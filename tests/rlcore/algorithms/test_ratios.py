"""Importance ratios: the worked number, the geometric mean over a sequence, the clamp."""

from __future__ import annotations

import math

import pytest
import torch

from rlcore.algorithms.ratios import (
    LOG_RATIO_LIMIT,
    clamped_difference,
    completion_ratio,
    sequence_mean,
    sequence_ratio,
    token_ratio,
)

ALL = torch.ones(3, dtype=torch.bool)


def test_the_ratio_of_the_worked_example_is_one_point_three_five() -> None:
    # exp(-1.8 - (-2.1)) = exp(0.3) = 1.34986
    log_ratio = clamped_difference(torch.tensor([-1.8]), torch.tensor([-2.1]), torch.tensor([True]))
    assert float(log_ratio.exp()) == pytest.approx(1.35, abs=5e-4)


def test_the_token_ratio_is_each_token_own() -> None:
    log_ratio = torch.tensor([0.1, -0.2, 0.3])
    assert token_ratio(log_ratio, torch.tensor([0, 0, 1]), ALL).tolist() == log_ratio.tolist()


def test_the_sequence_ratio_is_the_geometric_mean_over_unmasked_tokens() -> None:
    # Sequence 4: (0.1 + 0.3) / 2 = 0.2, its masked token does not count; sequence 2: 0.6.
    log_ratio = torch.tensor([0.1, 9.0, 0.3, 0.6], dtype=torch.float64)
    sequence, mask = torch.tensor([4, 4, 4, 2]), torch.tensor([True, False, True, True])
    assert sequence_ratio(log_ratio, sequence, mask).tolist() == pytest.approx([0.2, 0.2, 0.2, 0.6])


def test_the_ratio_of_a_completion_is_the_product_over_its_own_tokens_within_the_clamp() -> None:
    # Sequence 4: 0.1 + 0.3 = 0.4, its masked token does not count; sequence 2: 15 + 15, more than the clamp.
    log_ratio = torch.tensor([0.1, 9.0, 0.3, 15.0, 15.0], dtype=torch.float64)
    sequence, mask = torch.tensor([4, 4, 4, 2, 2]), torch.tensor([True, False, True, True, True])
    assert completion_ratio(log_ratio, sequence, mask).tolist() == pytest.approx([0.4, 0.4, 0.4, 20.0, 20.0])


def test_the_mean_of_a_sequence_that_is_masked_as_a_whole_is_zero() -> None:
    means = sequence_mean(torch.tensor([math.nan, 1.0]), torch.tensor([0, 1]), torch.tensor([False, True]))
    assert means.tolist() == [0.0, 1.0]


def test_no_tokens_give_no_means() -> None:
    empty = torch.empty(0, dtype=torch.int64)
    assert sequence_mean(torch.empty(0), empty, empty.bool()).shape == (0,)


def test_a_difference_is_clamped_so_that_its_exponential_is_finite() -> None:
    difference = clamped_difference(torch.tensor([0.0, -500.0, 3.0]), torch.tensor([-500.0, 0.0, 1.0]), ALL)
    assert difference.tolist() == [LOG_RATIO_LIMIT, -LOG_RATIO_LIMIT, 2.0]


def test_nan_stays_visible_where_it_is_not_masked() -> None:
    difference = clamped_difference(torch.tensor([math.nan, math.nan]), torch.zeros(2), torch.tensor([True, False]))
    assert math.isnan(difference[0])
    assert difference[1] == 0.0

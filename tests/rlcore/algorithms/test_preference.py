"""Bradley-Terry: worked numbers, margin, weights of ranked sets."""

from __future__ import annotations

import math

import pytest
import torch

from rlcore.algorithms.preference import bradley_terry


def loss_of(chosen: list[float], rejected: list[float], margins: list[float], weights: list[float]) -> float:
    """The loss from plain lists."""
    return float(bradley_terry(*(torch.tensor(column) for column in (chosen, rejected, margins, weights))))


def test_equal_scores_cost_the_logarithm_of_two() -> None:
    assert loss_of([0.3], [0.3], [0.0], [1.0]) == pytest.approx(math.log(2))


def test_the_loss_is_minus_the_log_sigmoid_of_the_difference_less_the_margin() -> None:
    # 2.0 - 0.5 - 0.5 = 1: -log(1 / (1 + e^-1)) = log(1.367879) = 0.313262
    assert loss_of([2.0], [0.5], [0.5], [1.0]) == pytest.approx(0.313262, abs=1e-6)


def test_pairs_count_by_their_weights() -> None:
    # A ranked list of three gives three pairs of weight 1/3; a single pair counts 1: both prompts weigh the same.
    three = loss_of([0.0] * 3, [0.0] * 3, [0.0] * 3, [1 / 3] * 3)
    assert three == pytest.approx(loss_of([0.0], [0.0], [0.0], [1.0]))


def test_a_hopeless_pair_has_a_finite_loss_and_gradient() -> None:
    chosen = torch.tensor([-1e4], requires_grad=True)
    loss = bradley_terry(chosen, torch.tensor([1e4]), torch.zeros(1), torch.ones(1))
    loss.backward()
    assert float(loss.detach()) == pytest.approx(2e4)
    assert chosen.grad is not None
    assert float(chosen.grad) == pytest.approx(-1.0)

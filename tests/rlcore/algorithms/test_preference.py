"""Bradley-Terry: worked numbers, margin, soft labels, weights; and of implicit rewards, which is DPO."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from rlcore.algorithms.preference import bradley_terry, implicit_rewards, smoothed


def loss_of(
    chosen: list[float],
    rejected: list[float],
    margins: list[float],
    weights: list[float],
    probabilities: list[float] | None = None,
) -> float:
    """The loss from plain lists, float64."""
    columns = {"margins": margins, "weights": weights, "probabilities": probabilities or [1.0] * len(chosen)}
    tensors = {name: torch.tensor(column, dtype=torch.float64) for name, column in columns.items()}
    sides = (torch.tensor(side, dtype=torch.float64) for side in (chosen, rejected))
    return float(bradley_terry(*sides, **tensors))


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
    one = torch.ones(1)
    loss = bradley_terry(chosen, torch.tensor([1e4]), margins=torch.zeros(1), probabilities=one, weights=one)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(2e4)
    assert chosen.grad is not None
    assert float(chosen.grad) == pytest.approx(-1.0)


def test_a_soft_label_mixes_the_loss_of_both_orders() -> None:
    # d = 1, p = 0.8: -0.8 ln σ(1) - 0.2 ln σ(-1) = 0.8 * 0.313262 + 0.2 * 1.313262 = 0.513262
    assert loss_of([1.0], [0.0], [0.0], [1.0], [0.8]) == pytest.approx(0.513262, abs=1e-6)


def test_a_margin_holds_for_whichever_side_is_the_better_one() -> None:
    # d = 1, m = 0.5, p = 0.8: -0.8 ln σ(0.5) - 0.2 ln σ(-1.5) = 0.8 * 0.474077 + 0.2 * 1.701413 = 0.719544
    assert loss_of([1.0], [0.0], [0.5], [1.0], [0.8]) == pytest.approx(0.719544, abs=1e-6)


@given(st.floats(-5, 5), st.floats(0, 2), st.floats(0.5, 1.0))
def test_swapping_the_sides_and_the_probability_changes_nothing(difference: float, margin: float, p: float) -> None:
    there = loss_of([difference], [0.0], [margin], [1.0], [p])
    back = loss_of([0.0], [difference], [margin], [1.0], [1.0 - p])
    assert there == pytest.approx(back, abs=1e-12)


def test_a_soft_label_is_fitted_by_its_own_log_odds() -> None:
    # The gradient in d is σ(d) - p: zero at d = ln(p / (1 - p)) = ln 4 for p = 0.8.
    difference = torch.tensor([math.log(4.0)], dtype=torch.float64, requires_grad=True)
    better = torch.tensor([0.8], dtype=torch.float64)
    columns = {"margins": torch.zeros(1), "probabilities": better, "weights": torch.ones(1)}
    bradley_terry(difference, torch.zeros(1), **columns).backward()
    assert difference.grad is not None
    assert float(difference.grad) == pytest.approx(0.0, abs=1e-12)


def test_smoothing_swaps_a_share_of_the_labels() -> None:
    # 1 * 0.9 + 0 * 0.1 = 0.9; 0.7 * 0.9 + 0.3 * 0.1 = 0.66
    assert smoothed(torch.tensor([1.0, 0.7]), 0.1).tolist() == pytest.approx([0.9, 0.66])


def dpo_loss(policy: torch.Tensor, ref: torch.Tensor, beta: float, smoothing: float = 0.0) -> torch.Tensor:
    """The mean loss of DPO from log-probabilities [2, P] of the chosen and the rejected sides."""
    chosen, rejected = (implicit_rewards(*side, beta=beta) for side in zip(policy, ref, strict=True))
    ones = torch.ones_like(chosen)
    labels = smoothed(ones, smoothing)
    return bradley_terry(chosen, rejected, margins=0.0 * ones, probabilities=labels, weights=ones / len(ones))


def test_the_loss_of_dpo_is_worked_out_by_hand() -> None:
    # Rewards: 0.1 (-10 + 12) = 0.2 and 0.1 (-11 + 10) = -0.1; their difference is 0.3.
    # -ln σ(0.3) = ln(1 + e^-0.3) = ln 1.740818 = 0.554355
    policy = torch.tensor([[-10.0], [-11.0]], dtype=torch.float64)
    ref = torch.tensor([[-12.0], [-10.0]], dtype=torch.float64)
    assert implicit_rewards(policy[0], ref[0], beta=0.1).tolist() == pytest.approx([0.2])
    assert float(dpo_loss(policy, ref, 0.1)) == pytest.approx(0.554355, abs=1e-6)
    # A tenth of the labels wrong: 0.9 * 0.554355 - 0.1 ln σ(-0.3) = 0.498920 + 0.1 * 0.854355 = 0.584355
    assert float(dpo_loss(policy, ref, 0.1, 0.1)) == pytest.approx(0.584355, abs=1e-6)


@given(st.lists(st.tuples(*[st.floats(-50, 0)] * 4), min_size=1, max_size=5), st.floats(0.01, 2), st.floats(0, 0.49))
def test_dpo_is_what_trl_writes(logprobs: list[tuple[float, ...]], beta: float, smoothing: float) -> None:
    # TRL's DPOTrainer, loss_type "sigmoid": the losses of pairs by the ratios of policy and reference.
    columns = torch.tensor(logprobs, dtype=torch.float64).T
    logratios, ref_logratios = columns[0] - columns[1], columns[2] - columns[3]
    logits = (logratios - ref_logratios) * beta
    theirs = -F.logsigmoid(logits) * (1 - smoothing) - F.logsigmoid(-logits) * smoothing
    ours = dpo_loss(columns[:2], columns[2:], beta, smoothing)
    assert float(ours) == pytest.approx(float(theirs.mean()), rel=1e-9, abs=1e-12)


def test_the_gradient_of_dpo_is_that_of_the_paper() -> None:
    # Section 4: -β σ(r_l - r_w) for the chosen side's log-probability, and as much up for the rejected side's.
    policy = torch.tensor([[-10.0], [-11.0]], dtype=torch.float64, requires_grad=True)
    dpo_loss(policy, torch.tensor([[-12.0], [-10.0]], dtype=torch.float64), 0.1).backward()
    pull = 0.1 / (1.0 + math.exp(0.3))
    assert policy.grad is not None
    assert policy.grad.flatten().tolist() == pytest.approx([-pull, pull])

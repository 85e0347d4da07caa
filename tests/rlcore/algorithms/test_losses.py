"""Ratios, surrogates, KL terms, weightings, critic and preference losses: values worked by hand, bounds, gradients."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from rlcore.algorithms.kl import KL_LOSSES, KlController, KlLossFn, PenaltyController, k1
from rlcore.algorithms.objective import explained_variance, value_loss
from rlcore.algorithms.preference import bradley_terry, implicit_rewards, smoothed
from rlcore.algorithms.surrogates import (
    LOG_RATIO_LIMIT,
    SurrogateFn,
    cispo,
    clamped_difference,
    completion_ratio,
    dppo_tv,
    ppo_clip,
    reinforce,
    sapo,
    sequence_mean,
    sequence_ratio,
)
from rlcore.algorithms.table import WEIGHTINGS

ALL = torch.ones(3, dtype=torch.bool)


def test_the_sequence_ratio_is_the_geometric_mean_over_unmasked_tokens() -> None:
    # Sequence 4: (0.1 + 0.3) / 2 = 0.2, its masked token does not count; sequence 2: 0.6.
    log_ratio = torch.tensor([0.1, 9.0, 0.3, 0.6], dtype=torch.float64)
    sequence, mask = torch.tensor([4, 4, 4, 2]), torch.tensor([True, False, True, True])
    assert sequence_ratio(log_ratio, sequence, mask).tolist() == pytest.approx([0.2, 0.2, 0.2, 0.6])


def test_completion_ratio_is_clamped_product() -> None:
    # Sequence 4: 0.1 + 0.3 = 0.4, its masked token does not count; sequence 2: 15 + 15, more than the clamp.
    log_ratio = torch.tensor([0.1, 9.0, 0.3, 15.0, 15.0], dtype=torch.float64)
    sequence, mask = torch.tensor([4, 4, 4, 2, 2]), torch.tensor([True, False, True, True, True])
    assert completion_ratio(log_ratio, sequence, mask).tolist() == pytest.approx([0.4, 0.4, 0.4, 20.0, 20.0])


def test_mean_of_masked_sequence_is_zero() -> None:
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


CLIP = partial(ppo_clip, clip_low=0.2, clip_high=0.2)
CISPO = partial(cispo, clip_low=0.5, clip_high=0.28)
REINFORCE = partial(reinforce, clip_low=0.2, clip_high=0.2)
DUAL = partial(ppo_clip, clip_low=0.2, clip_high=0.2, dual_clip=3.0)
SAPO = partial(sapo, gate_positive=1.0, gate_negative=1.05)
DPPO = partial(dppo_tv, clip_low=0.15, clip_high=0.15)


def of_one_token(function: SurrogateFn, pi: float, mu: float, advantage: float) -> tuple[float, float, bool, bool]:
    """Loss, its gradient with respect to the log-probability, and the two clip flags; pi and mu: new and old chance."""
    logprob = torch.tensor([math.log(pi)], dtype=torch.float64, requires_grad=True)
    result = function(logprob - math.log(mu), logprob, torch.tensor([advantage], dtype=torch.float64))
    (gradient,) = torch.autograd.grad(result.loss.sum(), logprob)
    return float(result.loss.detach()), float(gradient), bool(result.clipped_low), bool(result.clipped_high)


@pytest.mark.parametrize(
    ("function", "pi", "mu", "advantage", "loss", "gradient", "low", "high"),
    [
        # Ratio 1.35: the objective is the smaller of 1.35 * 0.2 and 1.2 * 0.2, a constant without gradient.
        (CLIP, 0.54, 0.4, 0.2, -0.24, 0.0, False, True),
        (CLIP, 0.54, 0.4, -0.2, 0.27, 0.27, False, False),  # min(1.35 * -0.2, 1.2 * -0.2): the pessimistic side
        (CLIP, 0.24, 0.4, -1.0, 0.8, 0.0, True, False),  # ratio 0.6: min(-0.6, -0.8), clipped
        (CLIP, 0.24, 0.4, 1.0, -0.6, -0.6, False, False),  # min(0.6, 0.8), not clipped
        # 1.27 is between 1.2 and 1.28: clipped by PPO, not by DAPO's clip-higher.
        (CLIP, 0.508, 0.4, 1.0, -1.2, 0.0, False, True),
        (partial(ppo_clip, clip_low=0.2, clip_high=0.28), 0.508, 0.4, 1.0, -1.27, -1.27, False, False),
        # Ratio 4, A = -2: plain PPO's loss is 8, without a bound; with c = 3 it is 3 * 2 and has no gradient.
        (CLIP, 0.8, 0.2, -2.0, 8.0, 8.0, False, False),
        (DUAL, 0.8, 0.2, -2.0, 6.0, 0.0, False, True),
        # The weight is cut to 1.28 or 0.5 and every token keeps its gradient: -1.28 * 2 * ln 0.5 = 1.774457.
        (CISPO, 0.5, 0.2, 2.0, 1.774457, -2.56, False, True),
        (CISPO, 0.5, 0.384615, 1.0, 0.887228, -1.28, False, True),  # ratio 1.3
        (CISPO, 0.5, 1.0, 1.0, 0.346574, -0.5, False, False),  # at the bound, exactly
        (CISPO, 0.2, 0.5, 1.0, 0.804719, -0.5, True, False),
        (CISPO, 0.3, 0.5, 1.0, 0.722384, -0.6, False, False),
        # Detached ratio 1: -3 ln 0.5 = 2.079442, gradient -3; ratio 1.1: both times 1.1.
        (REINFORCE, 0.5, 0.5, 3.0, 2.079442, -3.0, False, False),
        (REINFORCE, 0.5, 0.454545, 3.0, 2.287386, -3.3, False, False),
        # Ratio 1.5, A = 2, tau = 1: -sigmoid(0.5) * 4 * 2; gradient -2 * 4 * 0.62246 * 0.37754 * 1.5.
        (SAPO, 0.6, 0.4, 2.0, -4.97968, -2.82005, False, False),
        # A = -1, tau = 1.05: sigmoid(0.525) * 4 / 1.05; gradient 4 * 0.628316 * 0.371684 * 1.5.
        (SAPO, 0.6, 0.4, -1.0, 2.393585, 1.40121, False, False),
        # The bound is on the probability that moved; where it is not masked, the gradient is the loss.
        (DPPO, 0.7, 0.5, 1.0, 0.0, 0.0, False, True),  # +0.2 and pushed up: masked
        (DPPO, 0.7, 0.5, -1.0, 1.4, 1.4, False, False),  # +0.2 and pushed back: kept, ratio 1.4
        (DPPO, 0.3, 0.5, -1.0, 0.0, 0.0, True, False),  # -0.2 and pushed down: masked
        (DPPO, 0.3, 0.5, 1.0, -0.6, -0.6, False, False),  # -0.2 and pushed back: kept, ratio 0.6
        (DPPO, 0.6, 0.5, 1.0, -1.2, -1.2, False, False),  # +0.1: within the bound
        (DPPO, 1e-3, 1e-5, 1.0, -100.0, -100.0, False, False),  # ratio 100: a ratio clip would cut
        (DPPO, 0.82, 0.99, -1.0, 0.0, 0.0, True, False),  # ratio 0.83: a ratio clip would let it be
    ],
)
def test_surrogates_by_hand(
    function: SurrogateFn, pi: float, mu: float, advantage: float, loss: float, gradient: float, low: bool, high: bool
) -> None:
    expected = (pytest.approx(loss, abs=1e-5), pytest.approx(gradient, abs=1e-5), low, high)
    assert of_one_token(function, pi, mu, advantage) == expected


def test_a_token_on_the_bound_or_without_advantage_is_not_counted_as_clipped() -> None:
    # exp(ln 2) = 2 and exp(-ln 2) = 0.5 exactly: bounds 1 + 1 and 1 - 0.5, dual clip 4 = exp(2 ln 2).
    log_ratio = torch.tensor([math.log(2.0), -math.log(2.0), 5.0, -5.0, math.log(4.0)], dtype=torch.float64)
    assert log_ratio.exp().tolist()[:2] == [2.0, 0.5]
    assert log_ratio.exp().tolist()[4] == 4.0
    advantages = torch.tensor([1.0, -1.0, 0.0, 0.0, -1.0], dtype=torch.float64)
    clip = partial(ppo_clip, clip_low=0.5, clip_high=1.0, dual_clip=4.0)
    for function, on in ((clip, 5), (partial(cispo, clip_low=0.5, clip_high=1.0), 2)):
        clipped = function(log_ratio[:on], torch.zeros(on, dtype=torch.float64), advantages[:on])
        assert not bool((clipped.clipped_high | clipped.clipped_low).any())
    # pi = 0.5 and mu = 0.25, then the reverse: a move of exactly ±0.25. Without advantage nothing is masked.
    pi = torch.tensor([0.5, 0.25, 0.5, 0.25], dtype=torch.float64)
    log_ratio = torch.tensor([math.log(2.0), -math.log(2.0)] * 2, dtype=torch.float64)
    advantages = torch.tensor([1.0, -1.0, 0.0, 0.0], dtype=torch.float64)
    on_bound = dppo_tv(log_ratio, pi.log(), advantages, clip_low=0.25, clip_high=0.25)
    assert on_bound.loss.tolist() == pytest.approx([-2.0, 0.5, 0.0, 0.0])
    beyond = dppo_tv(log_ratio, pi.log(), advantages, clip_low=0.2, clip_high=0.2)
    assert beyond.loss.tolist() == pytest.approx([0.0] * 4)
    assert beyond.clipped_high.tolist() == [True, False, False, False]
    assert beyond.clipped_low.tolist() == [False, True, False, False]


@pytest.mark.parametrize("advantage", [2.0, -2.0])
@pytest.mark.parametrize("ratio", [0.5, 0.79, 0.81, 1.0, 1.19, 1.21, 3.0])
def test_reinforce_has_the_gradient_and_the_cuts_of_the_clip(ratio: float, advantage: float) -> None:
    ours, theirs = (of_one_token(function, 0.3 * ratio, 0.3, advantage)[1:] for function in (REINFORCE, CLIP))
    assert ours == (pytest.approx(theirs[0]), *theirs[1:])


# Not so small that rounding hides the bound of 3, nor a ratio that may be rounded past it.
@given(log_ratio=st.floats(-3, 3), advantage=st.floats(-5, 5).filter(lambda each: each == 0 or abs(each) > 1e-300))
@example(log_ratio=math.log(3.0), advantage=-1.0)
def test_dual_clip_changes_nothing_up_to_its_ratio_nor_for_a_good_token(log_ratio: float, advantage: float) -> None:
    if log_ratio > math.log(3.0) - 1e-9 and advantage < 0:
        advantage = -advantage
    plain, dual = (of_one_token(each, math.exp(log_ratio - 4.0), math.exp(-4.0), advantage) for each in (CLIP, DUAL))
    assert plain == dual


Categorical = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def categorical(seed: int) -> Categorical:
    """Logits of the policy (with gradient), log-probabilities of the old policy and of the reference; float64 [7]."""
    generator = torch.Generator().manual_seed(seed)
    logits, old, reference = torch.randn(3, 7, generator=generator, dtype=torch.float64)
    return logits.requires_grad_(), old.log_softmax(0), reference.log_softmax(0)


def gradient_of(loss: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(loss, logits)[0]


def exact_gradient(logits: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Gradient of the reverse KL, ``sum p (log p - log ref)``."""
    logprobs = logits.log_softmax(0)
    return gradient_of((logprobs.exp() * (logprobs - reference)).sum(), logits)


def expected_gradient(
    function: KlLossFn, logits: torch.Tensor, sampled_from: torch.Tensor, reference: torch.Tensor
) -> torch.Tensor:
    """The expectation, over tokens drawn from ``sampled_from``, of the gradient of a per-token loss."""
    logprobs = logits.log_softmax(0)
    per_token = function(logprobs - reference, logprobs - sampled_from)
    return gradient_of((sampled_from.exp() * per_token).sum(), logits)


def without_ratio(estimator: Callable[[torch.Tensor], torch.Tensor]) -> KlLossFn:
    """An estimator used as a loss without the ratio."""
    return lambda d, log_ratio: estimator(d)


def test_plain_k1_has_zero_gradient() -> None:
    logits, _, reference = categorical(0)
    result = expected_gradient(without_ratio(k1), logits, logits.detach().log_softmax(0), reference)
    torch.testing.assert_close(result, torch.zeros(7, dtype=torch.float64))
    assert float(exact_gradient(logits, reference).norm()) > 0.1


def test_plain_k2_has_the_gradient_of_the_reverse_kl_on_policy_alone() -> None:
    logits, old, reference = categorical(0)
    exact = exact_gradient(logits, reference)
    on_policy = expected_gradient(KL_LOSSES["k2_plain"], logits, logits.detach().log_softmax(0), reference)
    torch.testing.assert_close(on_policy, exact, rtol=1e-10, atol=1e-12)
    assert float((expected_gradient(KL_LOSSES["k2_plain"], logits, old, reference) - exact).norm()) > 0.01


def test_plain_k3_has_the_gradient_of_the_forward_kl() -> None:
    logits, _, reference = categorical(0)
    result = expected_gradient(KL_LOSSES["k3_plain"], logits, logits.detach().log_softmax(0), reference)
    forward = gradient_of((reference.exp() * (reference - logits.log_softmax(0))).sum(), logits)
    torch.testing.assert_close(result, forward, rtol=1e-10, atol=1e-12)
    assert float((result - exact_gradient(logits, reference)).norm()) > 0.01


@pytest.mark.parametrize("name", sorted(KL_LOSSES))
def test_kl_gradient_survives_vanished_token(name: str) -> None:
    # k3 of d = -15 is 3 million: a clamp of its value would remove the gradient just where it is needed.
    d = torch.tensor([-15.0], dtype=torch.float64, requires_grad=True)
    loss = KL_LOSSES[name](d, d - d.detach())
    assert abs(float(torch.autograd.grad(loss, d)[0])) > 1.0


@pytest.mark.parametrize("name", sorted(KL_LOSSES))
def test_kl_losses_by_hand(name: str) -> None:
    # d = ln 2, ratio 1.5: k1 = 0.6931, k2 = 0.2402, k3 = 0.1931; times 1.5: 1.0397, 0.3603, 0.2897.
    d, log_ratio = torch.tensor([[2.0], [1.5]], dtype=torch.float64).log()
    expected = {"k1_ratio": 1.0397, "k2": 0.3603, "k3_ratio": 0.2897, "k2_plain": 0.2402, "k3_plain": 0.1931}
    assert float(KL_LOSSES[name](d, log_ratio)) == pytest.approx(expected[name], abs=5e-5)


def test_adaptive_kl_coefficient_by_hand() -> None:
    # target 6, measured 6.6: error 0.1, 64 of 640 samples: factor 1 + 0.1 * 0.1 = 1.01.
    controller = KlController(coefficient=0.2, target=6.0, horizon=640)
    updated = controller.updated(6.6, 64)
    assert (updated.coefficient, updated.target, updated.horizon) == (pytest.approx(0.2 * 1.01), 6.0, 640)
    # measured 60: the error 9 is clipped to 0.2: factor 1.02. Measured 0: -0.2, factor 0.98.
    assert controller.updated(60.0, 64).coefficient == pytest.approx(0.2 * 1.02)
    assert controller.updated(0.0, 64).coefficient == pytest.approx(0.2 * 0.98)
    # By default of 10,000 completions: 1,000 are a factor of 1 + 0.2 * 0.1.
    assert KlController(coefficient=1.0, target=1.0).updated(9.0, 1000).coefficient == pytest.approx(1.02, rel=1e-12)
    assert KlController(coefficient=0.1).updated(5.0, 64).coefficient == 0.1


@pytest.mark.parametrize(
    ("measured", "factor"),
    [
        (0.0, 0.5),
        (math.nextafter(0.03 / 1.5, 0.0), 0.5),
        (0.03 / 1.5, 1.0),
        (0.03, 1.0),
        (0.03 * 1.5, 1.0),
        (math.nextafter(0.03 * 1.5, 1.0), 2.0),
        (9.0, 2.0),
    ],
)
def test_penalty_is_halved_or_doubled_beyond_bounds(measured: float, factor: float) -> None:
    controller = PenaltyController(coefficient=0.7, target=0.03)
    assert controller.updated(measured) == dataclasses.replace(controller, coefficient=0.7 * factor)


MASK = torch.tensor([[True, True, True, True], [True, False, False, False], [False, False, False, False]])


@pytest.mark.parametrize(
    ("name", "first", "second", "of_long_episode", "of_others"),
    [
        # 4 + 1 + 0 tokens: 1/5 each. Two sequences have tokens: 1/2 spread over 4 tokens and over 1; the third, masked
        # as a whole, is in neither numerator nor denominator. Length 8: 1 / (2 * 8).
        ("token_mean", 1 / 5, 1 / 5, 1 / 14, 1 / 14),
        ("sequence_mean", 1 / 8, 1 / 2, 1 / 32, 1 / 8),
        ("sequence_sum", 1 / 2, 1 / 2, 1 / 4, 1 / 4),
        ("constant", 1 / 16, 1 / 16, 1 / 32, 1 / 32),
    ],
)
def test_weightings_by_hand(name: str, first: float, second: float, of_long_episode: float, of_others: float) -> None:
    function = partial(WEIGHTINGS[name], **({"constant_length": 8} if name == "constant" else {}))
    assert function(MASK, torch.arange(3)).flatten().tolist() == pytest.approx([first] * 4 + [second] + [0.0] * 7)
    assert function(torch.zeros(2, 3, dtype=torch.bool), torch.arange(2)).tolist() == [[0.0] * 3] * 2
    # Episode 7 has 4 + 1 + 1 + 2 = 8 tokens in four samples, three others 2 each in one: each episode weighs the same.
    lengths, episode = [4, 1, 1, 2, 2, 2, 2], torch.tensor([7, 7, 7, 7, 3, 1, 9])
    mask = torch.arange(4) < torch.tensor(lengths)[:, None]
    of_samples = function(mask, episode).max(1).values.tolist()
    assert of_samples == pytest.approx([of_long_episode] * 4 + [of_others] * 3)


@pytest.mark.parametrize(
    ("value", "old", "target", "settings", "loss", "slope"),
    [
        # clipped V = 0.7: 0.5 * max((1 - 2)^2, (0.7 - 2)^2) = 0.5 * 1.69; the clipped side has no gradient
        (1.0, 0.5, 2.0, {"clip_range": 0.2}, 0.845, 0.0),
        (1.0, 0.5, 0.6, {"clip_range": 0.2}, 0.08, 0.4),  # 0.5 * max(0.16, 0.01)
        (1.0, 0.5, 2.0, {"clip_range": 0.0}, 0.5, -1.0),  # no clipping
        (1.4, 0.0, 1.0, {"clip_range": 0.0, "huber_delta": 0.5}, 0.08, 0.4),  # within delta: the square
        (0.0, 0.0, 2.0, {"clip_range": 0.0, "huber_delta": 0.5}, 0.875, -0.5),  # beyond: 0.5 * (2 - 0.5 / 2)
        (1.0, 0.5, 2.0, {"clip_range": 0.2, "huber_delta": 0.5}, 0.525, 0.0),  # errors -1 and -1.3: 0.5 * (1.3 - 0.25)
    ],
)
def test_value_loss_by_hand(
    value: float, old: float, target: float, settings: dict[str, float], loss: float, slope: float
) -> None:
    values = torch.tensor([value], dtype=torch.float64, requires_grad=True)
    found = value_loss(values, *torch.tensor([[old], [target]], dtype=torch.float64), **settings)
    assert float(found.detach()) == pytest.approx(loss)
    assert float(torch.autograd.grad(found.sum(), values)[0]) == pytest.approx(slope)


def test_explained_variance_is_one_for_a_perfect_critic_and_zero_for_a_constant_one() -> None:
    returns = torch.tensor([1.0, 2.0, 3.0])
    assert explained_variance(returns, returns) == 1.0
    assert explained_variance(torch.full((3,), 7.0), returns) == pytest.approx(0.0)
    assert explained_variance(-returns, returns) == pytest.approx(-3.0)  # Var(2 R) / Var(R) = 4


def test_returns_that_hardly_vary_count_as_constant() -> None:
    # Variances 0.64e-12 and 1.44e-12, on both sides of 1e-12; the critic is perfect.
    for spread, expected in ((0.8e-6, 0.0), (1.2e-6, 1.0)):
        returns = torch.tensor([-spread, spread], dtype=torch.float64)
        assert explained_variance(returns, returns) == expected


@pytest.mark.parametrize(
    ("chosen", "rejected", "margin", "weight", "probability", "loss"),
    [
        (0.3, 0.3, 0.0, 1.0, 1.0, 0.693147),  # ln 2
        (2.0, 0.5, 0.5, 1.0, 1.0, 0.313262),  # -ln σ(1) = ln 1.367879
        (2.0, 0.5, 0.5, 1 / 3, 1.0, 0.104421),
        (1.0, 0.0, 0.0, 1.0, 0.8, 0.513262),  # -0.8 ln σ(1) - 0.2 ln σ(-1) = 0.8 * 0.313262 + 0.2 * 1.313262
        (1.0, 0.0, 0.5, 1.0, 0.8, 0.719544),  # -0.8 ln σ(0.5) - 0.2 ln σ(-1.5) = 0.8 * 0.474077 + 0.2 * 1.701413
    ],
)
def test_preference_loss_by_hand(
    chosen: float, rejected: float, margin: float, weight: float, probability: float, loss: float
) -> None:
    columns = {"margins": margin, "weights": weight, "probabilities": probability}
    pairs = {name: torch.tensor([value] * 2, dtype=torch.float64) for name, value in columns.items()}
    sides = (torch.tensor([score] * 2, dtype=torch.float64) for score in (chosen, rejected))
    assert float(bradley_terry(*sides, **pairs)) == pytest.approx(2 * loss, abs=2e-6)


def test_a_hopeless_pair_has_a_finite_loss_and_gradient() -> None:
    chosen = torch.tensor([-1e4], requires_grad=True)
    one = torch.ones(1)
    loss = bradley_terry(chosen, torch.tensor([1e4]), margins=torch.zeros(1), probabilities=one, weights=one)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(2e4)
    assert chosen.grad is not None
    assert float(chosen.grad) == pytest.approx(-1.0)


def dpo_loss(policy: torch.Tensor, ref: torch.Tensor, beta: float, smoothing: float = 0.0) -> torch.Tensor:
    """The mean loss of DPO from log-probabilities [2, P] of the chosen and the rejected sides."""
    chosen, rejected = (implicit_rewards(*side, beta=beta) for side in zip(policy, ref, strict=True))
    ones = torch.ones_like(chosen)
    labels = smoothed(ones, smoothing)
    return bradley_terry(chosen, rejected, margins=0.0 * ones, probabilities=labels, weights=ones / len(ones))


def test_dpo_loss_by_hand() -> None:
    # Rewards: 0.1 (-10 + 12) = 0.2 and 0.1 (-11 + 10) = -0.1; their difference is 0.3.
    # -ln σ(0.3) = ln(1 + e^-0.3) = ln 1.740818 = 0.554355
    policy = torch.tensor([[-10.0], [-11.0]], dtype=torch.float64)
    ref = torch.tensor([[-12.0], [-10.0]], dtype=torch.float64)
    assert implicit_rewards(policy[0], ref[0], beta=0.1).tolist() == pytest.approx([0.2])
    assert float(dpo_loss(policy, ref, 0.1)) == pytest.approx(0.554355, abs=1e-6)
    # A tenth of the labels wrong: 0.9 * 0.554355 - 0.1 ln σ(-0.3) = 0.498920 + 0.1 * 0.854355 = 0.584355
    assert float(dpo_loss(policy, ref, 0.1, 0.1)) == pytest.approx(0.584355, abs=1e-6)
    # 0.7 * 0.9 + 0.3 * 0.1 = 0.66
    assert smoothed(torch.tensor([1.0, 0.7]), 0.1).tolist() == pytest.approx([0.9, 0.66])


def test_dpo_gradient_equals_paper() -> None:
    # Section 4: -β σ(r_l - r_w) for the chosen side's log-probability, and as much up for the rejected side's.
    policy = torch.tensor([[-10.0], [-11.0]], dtype=torch.float64, requires_grad=True)
    dpo_loss(policy, torch.tensor([[-12.0], [-10.0]], dtype=torch.float64), 0.1).backward()
    pull = 0.1 / (1.0 + math.exp(0.3))
    assert policy.grad is not None
    assert policy.grad.flatten().tolist() == pytest.approx([-pull, pull])


@pytest.mark.parametrize("on_policy", [True, False])
@pytest.mark.parametrize("name", ["k1_ratio", "k2", "k3_ratio"])
def test_expected_gradient_of_kl_loss_is_reverse_kl(name: str, on_policy: bool) -> None:
    logits, old, reference = categorical(1)
    drawn_from = logits.detach().log_softmax(0) if on_policy else old
    found = expected_gradient(KL_LOSSES[name], logits, drawn_from, reference)
    torch.testing.assert_close(found, exact_gradient(logits, reference), rtol=1e-6, atol=1e-9)

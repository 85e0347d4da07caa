"""Policy losses per token: worked numbers, both sides of the clip, and where the gradient stops."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from rlcore.algorithms.surrogates import SurrogateFn, cispo, dppo_tv, ppo_clip, reinforce, sapo
from tests.reference import losses

CLIP = partial(ppo_clip, clip_low=0.2, clip_high=0.2)


def of_one_token(
    function: SurrogateFn, *, logp: float, old: float, advantage: float
) -> tuple[float, float, bool, bool]:
    """Loss, its gradient with respect to the log-probability, and the two clip flags."""
    logprob = torch.tensor([logp], dtype=torch.float64, requires_grad=True)
    result = function(logprob - old, logprob, torch.tensor([advantage], dtype=torch.float64))
    (gradient,) = torch.autograd.grad(result.loss.sum(), logprob)
    return float(result.loss.detach()), float(gradient), bool(result.clipped_low), bool(result.clipped_high)


def test_the_worked_example_is_clipped_from_above() -> None:
    # logp -1.8, old -2.1: ratio 1.35, clipped 1.2; A = 0.2: 1.35 * 0.2 = 0.27, 1.2 * 0.2 = 0.24; the objective is the
    # smaller, 0.24, and the loss its negative. The bound is a constant, so no gradient is left.
    loss, gradient, low, high = of_one_token(CLIP, logp=-1.8, old=-2.1, advantage=0.2)
    assert math.exp(-1.8 + 2.1) * 0.2 == pytest.approx(0.27, abs=5e-5)
    assert -loss == pytest.approx(0.24)
    assert (gradient, low, high) == (0.0, False, True)


def test_the_same_ratio_with_a_negative_advantage_is_not_clipped() -> None:
    # min(1.35 * -0.2, 1.2 * -0.2) = -0.27: the pessimistic side, and it keeps its gradient, 0.27.
    loss, gradient, low, high = of_one_token(CLIP, logp=-1.8, old=-2.1, advantage=-0.2)
    assert (loss, gradient) == (pytest.approx(0.27, abs=5e-5), pytest.approx(0.27, abs=5e-5))
    assert (low, high) == (False, False)


def test_a_small_ratio_is_clipped_from_below_only_when_the_advantage_is_negative() -> None:
    # ratio exp(-0.5) = 0.6065 < 0.8. A = -1: min(-0.6065, -0.8) = -0.8, clipped. A = 1: min(0.6065, 0.8), not clipped.
    loss, gradient, low, high = of_one_token(CLIP, logp=-1.5, old=-1.0, advantage=-1.0)
    assert (loss, gradient, low, high) == (pytest.approx(0.8), 0.0, True, False)
    loss, gradient, low, high = of_one_token(CLIP, logp=-1.5, old=-1.0, advantage=1.0)
    assert (loss, gradient) == (pytest.approx(-0.6065, abs=5e-5), pytest.approx(-0.6065, abs=5e-5))
    assert (low, high) == (False, False)


def test_the_upper_bound_may_be_higher_than_the_lower() -> None:
    # exp(0.24) = 1.2712 lies between 1.2 and 1.28: clipped by PPO, not by DAPO's clip-higher.
    assert of_one_token(CLIP, logp=-1.0, old=-1.24, advantage=1.0)[3]
    assert not of_one_token(partial(ppo_clip, clip_low=0.2, clip_high=0.28), logp=-1.0, old=-1.24, advantage=1.0)[3]


@given(log_ratio=st.floats(-3, 3), advantage=st.floats(-5, 5))
def test_ppo_clip_equals_the_plain_loop(log_ratio: float, advantage: float) -> None:
    token = losses.Token(
        logprob=torch.tensor(log_ratio - 1.0, dtype=torch.float64),
        old_logprob=torch.tensor(-1.0, dtype=torch.float64),
        ref_logprob=torch.tensor(-1.0, dtype=torch.float64),
        advantage=advantage,
    )
    loss, *_ = of_one_token(CLIP, logp=log_ratio - 1.0, old=-1.0, advantage=advantage)
    assert loss == pytest.approx(-float(losses.clipped_objective(token, 0.8, 1.2)), rel=1e-12, abs=1e-12)


def test_cispo_cuts_the_weight_but_keeps_the_gradient_of_every_token() -> None:
    # ratio exp(1) = 2.718, cut to 1.28; loss = -1.28 * 2 * logp = -1.28 * 2 * -1 = 2.56, gradient -1.28 * 2 = -2.56.
    function = partial(cispo, clip_low=1.0, clip_high=0.28)
    loss, gradient, low, high = of_one_token(function, logp=-1.0, old=-2.0, advantage=2.0)
    assert (loss, gradient) == (pytest.approx(2.56), pytest.approx(-2.56))
    assert (low, high) == (False, True)
    # From below nothing is cut: ratio exp(-2) = 0.1353 is the weight.
    assert of_one_token(function, logp=-3.0, old=-1.0, advantage=2.0)[1] == pytest.approx(-0.2707, abs=5e-5)


@pytest.mark.parametrize(("ratio", "low", "high"), [(0.4, True, False), (0.6, False, False), (1.2, False, False)])
def test_cispo_tells_on_which_side_it_has_cut(ratio: float, low: bool, high: bool) -> None:
    function = partial(cispo, clip_low=0.5, clip_high=0.28)
    assert of_one_token(function, logp=-1.0, old=-1.0 - math.log(ratio), advantage=1.0)[2:] == (low, high)
    assert of_one_token(function, logp=-1.0, old=-1.0 - math.log(1.3), advantage=1.0)[2:] == (False, True)


def test_a_ratio_at_a_bound_of_cispo_is_not_cut() -> None:
    function = partial(cispo, clip_low=0.5, clip_high=1.0)
    assert of_one_token(function, logp=math.log(0.5), old=0.0, advantage=1.0)[2:] == (False, False)
    assert of_one_token(function, logp=math.log(2.0), old=0.0, advantage=1.0)[2:] == (False, False)


REINFORCE = partial(reinforce, clip_low=0.2, clip_high=0.2)


def test_reinforce_is_the_detached_ratio_times_the_advantage_times_the_log_probability() -> None:
    # ratio 1: -3 * -0.7 = 2.1, gradient -3. Ratio 1.1 = exp(0.0953): both times 1.1.
    on_policy = of_one_token(REINFORCE, logp=-0.7, old=-0.7, advantage=3.0)
    assert on_policy == (pytest.approx(2.1), pytest.approx(-3.0), False, False)
    later = of_one_token(REINFORCE, logp=-0.7, old=-0.7 - math.log(1.1), advantage=3.0)
    assert later == (pytest.approx(2.31), pytest.approx(-3.3), False, False)


@pytest.mark.parametrize("advantage", [2.0, -2.0])
@pytest.mark.parametrize("ratio", [0.5, 0.79, 0.81, 1.0, 1.19, 1.21, 3.0])
def test_reinforce_has_the_gradient_and_the_cuts_of_the_clip(ratio: float, advantage: float) -> None:
    plain = partial(ppo_clip, clip_low=0.2, clip_high=0.2)
    ours, theirs = (
        of_one_token(function, logp=-1.0, old=-1.0 - math.log(ratio), advantage=advantage)[1:]
        for function in (REINFORCE, plain)
    )
    assert ours == (pytest.approx(theirs[0]), *theirs[1:])


DUAL = partial(ppo_clip, clip_low=0.2, clip_high=0.2, dual_clip=3.0)


def test_dual_clip_bounds_the_loss_of_a_bad_token_that_became_far_more_likely() -> None:
    # ratio 4, A = -2: plain PPO's loss is 8, without a bound; with c = 3 it is 3 * 2 = 6 and has no gradient.
    assert of_one_token(CLIP, logp=math.log(0.8), old=math.log(0.2), advantage=-2.0)[0] == pytest.approx(8.0)
    loss, gradient, low, high = of_one_token(DUAL, logp=math.log(0.8), old=math.log(0.2), advantage=-2.0)
    assert (loss, gradient, low, high) == (pytest.approx(6.0), 0.0, False, True)


# Not so small that rounding hides the bound of 3, nor a ratio that may be rounded past it.
@given(log_ratio=st.floats(-3, 3), advantage=st.floats(-5, 5).filter(lambda each: each == 0 or abs(each) > 1e-300))
@example(log_ratio=math.log(3.0), advantage=-1.0)
def test_dual_clip_changes_nothing_up_to_its_ratio_nor_for_a_good_token(log_ratio: float, advantage: float) -> None:
    if log_ratio > math.log(3.0) - 1e-9 and advantage < 0:
        advantage = -advantage
    plain, dual = (of_one_token(f, logp=log_ratio - 4.0, old=-4.0, advantage=advantage) for f in (CLIP, DUAL))
    assert plain == dual


SAPO = partial(sapo, gate_positive=1.0, gate_negative=1.05)


def test_the_gate_of_sapo_gives_the_numbers_worked_by_hand() -> None:
    # ratio 1.5, A = 2, tau = 1: sigmoid(0.5) = 0.62246; loss = -0.62246 * 4 * 2 = -4.97968.
    # Gradient: -A * 4 * s * (1 - s) * ratio = -2 * 4 * 0.62246 * 0.37754 * 1.5 = -2.82005.
    assert of_one_token(SAPO, logp=math.log(0.6), old=math.log(0.4), advantage=2.0) == (
        pytest.approx(-4.97968, abs=1e-4),
        pytest.approx(-2.82005, abs=1e-4),
        False,
        False,
    )
    # A = -1, tau = 1.05: sigmoid(0.525) = 0.628316; loss = 0.628316 * 4 / 1.05 = 2.393585; gradient
    # 4 * 0.628316 * 0.371684 * 1.5 = 1.40121.
    loss, gradient, *_ = of_one_token(SAPO, logp=math.log(0.6), old=math.log(0.4), advantage=-1.0)
    assert (loss, gradient) == (pytest.approx(2.393585, abs=1e-5), pytest.approx(1.40121, abs=1e-5))


@given(log_ratio=st.floats(-3, 3).filter(lambda x: abs(x) > 0.05), advantage=st.floats(0.1, 5))
def test_the_gate_of_sapo_fades_on_both_sides_and_faster_for_bad_tokens(log_ratio: float, advantage: float) -> None:
    ratio = math.exp(log_ratio)
    good = of_one_token(SAPO, logp=log_ratio - 4.0, old=-4.0, advantage=advantage)[1]
    bad = of_one_token(SAPO, logp=log_ratio - 4.0, old=-4.0, advantage=-advantage)[1]
    assert 0.0 < bad < -good < ratio * advantage


DPPO = partial(dppo_tv, clip_low=0.15, clip_high=0.15)


@pytest.mark.parametrize(
    ("mu", "pi", "advantage", "loss", "low", "high"),
    [
        (0.5, 0.7, 1.0, 0.0, False, True),  # +0.2 and pushed up: masked
        (0.5, 0.7, -1.0, 1.4, False, False),  # +0.2 and pushed back: kept, ratio 1.4
        (0.5, 0.3, -1.0, 0.0, True, False),  # -0.2 and pushed down: masked
        (0.5, 0.3, 1.0, -0.6, False, False),  # -0.2 and pushed back: kept, ratio 0.6
        (0.5, 0.6, 1.0, -1.2, False, False),  # +0.1: within the bound
        (1e-5, 1e-3, 1.0, -100.0, False, False),  # ratio 100, and hardly any probability moved: a ratio clip would cut
        (0.99, 0.82, -1.0, 0.0, True, False),  # ratio 0.83, and 0.17 of probability gone: a ratio clip would let it be
    ],
)
def test_dppo_masks_by_moved_probability_and_only_what_would_move_further(
    mu: float, pi: float, advantage: float, loss: float, low: bool, high: bool
) -> None:
    result = of_one_token(DPPO, logp=math.log(pi), old=math.log(mu), advantage=advantage)
    # d(-ratio * A) / d logp = -ratio * A: the gradient is the loss itself, and 0 where masked.
    assert result == (pytest.approx(loss), pytest.approx(loss), low, high)


def test_a_token_on_the_bound_or_without_advantage_is_not_counted_as_clipped() -> None:
    # exp(ln 2) = 2 and exp(-ln 2) = 0.5 exactly: bounds 1 + 1 and 1 - 0.5, dual clip 4 = exp(2 ln 2).
    log_ratio = torch.tensor([math.log(2.0), -math.log(2.0), 5.0, -5.0, math.log(4.0)], dtype=torch.float64)
    assert log_ratio.exp().tolist()[:2] == [2.0, 0.5]
    assert log_ratio.exp().tolist()[4] == 4.0
    advantages = torch.tensor([1.0, -1.0, 0.0, 0.0, -1.0], dtype=torch.float64)
    clipped = ppo_clip(
        log_ratio, torch.zeros(5, dtype=torch.float64), advantages, clip_low=0.5, clip_high=1.0, dual_clip=4.0
    )
    assert clipped.clipped_high.tolist() == [False] * 5
    assert clipped.clipped_low.tolist() == [False] * 5


def test_dppo_lets_a_token_on_the_bound_pass_and_counts_none_without_advantage() -> None:
    # pi = 0.5 and mu = 0.25, then the reverse: a move of exactly ±0.25. Without advantage nothing is masked.
    pi = torch.tensor([0.5, 0.25, 0.5, 0.25], dtype=torch.float64)
    log_ratio = torch.tensor([math.log(2.0), -math.log(2.0)] * 2, dtype=torch.float64)
    assert (pi.log() - log_ratio).exp().tolist() == [0.25, 0.5, 0.25, 0.5]
    advantages = torch.tensor([1.0, -1.0, 0.0, 0.0], dtype=torch.float64)
    on_bound = dppo_tv(log_ratio, pi.log(), advantages, clip_low=0.25, clip_high=0.25)
    assert on_bound.loss.tolist() == pytest.approx([-2.0, 0.5, 0.0, 0.0])
    beyond = dppo_tv(log_ratio, pi.log(), advantages, clip_low=0.2, clip_high=0.2)
    assert beyond.loss.tolist() == pytest.approx([0.0, 0.0, 0.0, 0.0])
    assert beyond.clipped_high.tolist() == [True, False, False, False]
    assert beyond.clipped_low.tolist() == [False, True, False, False]

"""Laws of ratios, surrogates, KL terms, mismatch weights and critic losses, token by token, in float64."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rlcore.algorithms.kl import KL_LOSSES, KlController, k1, k2, k3
from rlcore.algorithms.objective import LossInputs, mismatch_correction
from rlcore.algorithms.preference import bradley_terry
from rlcore.algorithms.ratios import clamped_difference, sequence_ratio, token_ratio
from rlcore.algorithms.surrogates import SurrogateFn, dppo_tv, ppo_clip, reinforce, sapo, unclipped
from rlcore.algorithms.table import ALGORITHMS
from rlcore.algorithms.values import explained_variance
from rlcore.config import RolloutCorrectionConfig

law = settings(max_examples=min(30, settings.default.max_examples), deadline=None)
seeds = st.integers(0, 10_000)
CLIP = partial(ppo_clip, clip_low=0.2, clip_high=0.28)
OF_TABLE = {getattr(row.surrogate, "func", row.surrogate).__name__: row.surrogate for row in ALGORITHMS.values()}
SURROGATES: dict[str, SurrogateFn] = {**OF_TABLE, "ppo_clip": CLIP, "dual": partial(CLIP, dual_clip=3.0)}
every = pytest.mark.parametrize("name", sorted(SURROGATES))


def draw(seed: int, count: int = 12, *, on_policy: bool = False) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-ratio and log-probability (which carry a gradient together) and advantages, [N]."""
    generator = torch.Generator().manual_seed(seed)
    old = -3.0 * torch.rand(count, generator=generator, dtype=torch.float64) - 0.01
    step = torch.zeros(count, dtype=torch.float64)
    if not on_policy:
        step = torch.randn(count, generator=generator, dtype=torch.float64) * 0.5
    logprobs = (old + step).clamp(max=-1e-3).requires_grad_()
    advantages = torch.randn(count, generator=generator, dtype=torch.float64)
    return logprobs - old, logprobs, advantages


def gradient(function: SurrogateFn, log_ratio: torch.Tensor, logprobs: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """Per token, with respect to its log-probability."""
    return torch.autograd.grad(function(log_ratio, logprobs, a).loss.sum(), logprobs, retain_graph=True)[0]


@every
@law
@given(seed=seeds)
def test_at_ratio_one_every_surrogate_has_the_gradient_of_the_policy_gradient(name: str, seed: int) -> None:
    log_ratio, logprobs, advantages = draw(seed, on_policy=True)
    result = gradient(SURROGATES[name], log_ratio, logprobs, advantages)
    torch.testing.assert_close(result, -advantages, rtol=1e-9, atol=1e-12)


@every
@law
@given(seed=seeds)
def test_no_surrogate_pushes_against_its_advantage(name: str, seed: int) -> None:
    log_ratio, logprobs, advantages = draw(seed)
    assert bool((gradient(SURROGATES[name], log_ratio, logprobs, advantages) * advantages <= 0.0).all())


@every
@law
@given(seed=seeds, factor=st.floats(0.1, 10.0))
def test_twice_the_advantage_is_twice_the_loss(name: str, seed: int, factor: float) -> None:
    log_ratio, logprobs, advantages = draw(seed)
    function = SURROGATES[name]
    torch.testing.assert_close(
        function(log_ratio, logprobs, factor * advantages).loss,
        factor * function(log_ratio, logprobs, advantages).loss,
        rtol=1e-9,
        atol=1e-12,
    )


@every
@law
@given(seed=seeds)
def test_a_surrogate_is_one_token_at_a_time(name: str, seed: int) -> None:
    log_ratio, logprobs, advantages = draw(seed)
    whole = SURROGATES[name](log_ratio, logprobs, advantages)
    for i in range(len(advantages)):
        one = SURROGATES[name](log_ratio[i : i + 1], logprobs[i : i + 1], advantages[i : i + 1])
        assert float(one.loss.detach()) == pytest.approx(float(whole.loss[i].detach()), rel=1e-12, abs=1e-12)
        assert bool(one.clipped_low) == bool(whole.clipped_low[i])
        assert bool(one.clipped_high) == bool(whole.clipped_high[i])


@pytest.mark.parametrize("name", ["ppo_clip", "dual", "dppo_tv"])
@law
@given(seed=seeds)
def test_a_token_has_no_gradient_exactly_where_it_is_flagged(name: str, seed: int) -> None:
    log_ratio, logprobs, advantages = draw(seed)
    flags = SURROGATES[name](log_ratio, logprobs, advantages)
    flagged = flags.clipped_low | flags.clipped_high
    assert torch.equal(gradient(SURROGATES[name], log_ratio, logprobs, advantages) == 0.0, flagged)
    assert not bool((flags.clipped_low & flags.clipped_high).any())


@law
@given(seed=seeds)
def test_the_clip_is_pessimistic(seed: int) -> None:
    # The clipped loss is never below the unclipped one: it is a lower bound of the objective.
    log_ratio, logprobs, advantages = draw(seed)
    assert bool((CLIP(log_ratio, logprobs, advantages).loss >= -log_ratio.exp() * advantages - 1e-12).all())


@law
@given(seed=seeds)
def test_a_clip_that_never_binds_leaves_ratio_times_advantage(seed: int) -> None:
    log_ratio, logprobs, advantages = draw(seed)
    wide = partial(ppo_clip, clip_low=1.0, clip_high=1e9), partial(dppo_tv, clip_low=1.0, clip_high=1.0)
    for function in (*wide, unclipped):
        loss = function(log_ratio, logprobs, advantages).loss
        torch.testing.assert_close(loss, -log_ratio.exp() * advantages, rtol=1e-12, atol=1e-12)


@law
@given(seed=seeds, wider=st.floats(0.0, 2.0))
def test_a_wider_upper_clip_never_raises_the_loss(seed: int, wider: float) -> None:
    log_ratio, logprobs, advantages = draw(seed)
    wide = partial(ppo_clip, clip_low=0.2, clip_high=0.28 + wider)(log_ratio, logprobs, advantages).loss
    assert bool((wide <= CLIP(log_ratio, logprobs, advantages).loss + 1e-12).all())


@law
@given(seed=seeds)
def test_cispo_has_the_clipped_ratio_as_the_weight_of_every_token(seed: int) -> None:
    log_ratio, logprobs, advantages = draw(seed)
    expected = -log_ratio.detach().exp().clamp(0.0, 1.28) * advantages
    torch.testing.assert_close(
        gradient(SURROGATES["cispo"], log_ratio, logprobs, advantages), expected, rtol=1e-12, atol=1e-12
    )


@law
@given(seed=seeds, sharper=st.floats(1.05, 4.0))
def test_a_sharper_gate_lets_less_through(seed: int, sharper: float) -> None:
    log_ratio, logprobs, advantages = draw(seed)
    sharp = partial(sapo, gate_positive=sharper, gate_negative=1.05 * sharper)
    plain = gradient(SURROGATES["sapo"], log_ratio, logprobs, advantages).abs()
    assert bool((gradient(sharp, log_ratio, logprobs, advantages).abs() <= plain + 1e-12).all())


@law
@given(seed=seeds)
def test_reinforce_without_bounds_is_the_policy_gradient_times_the_ratio(seed: int) -> None:
    log_ratio, logprobs, advantages = draw(seed)
    free = partial(reinforce, clip_low=1.0, clip_high=1e9)
    expected = -log_ratio.detach().exp() * advantages
    torch.testing.assert_close(gradient(free, log_ratio, logprobs, advantages), expected, rtol=1e-12, atol=1e-12)


def sequences(seed: int, count: int = 12) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-ratios, the sequence of each (of four), and a mask."""
    generator = torch.Generator().manual_seed(seed)
    log_ratio = torch.randn(count, generator=generator, dtype=torch.float64)
    index = torch.randint(0, 4, (count,), generator=generator)
    return log_ratio, index, torch.rand(count, generator=generator) > 0.3


@law
@given(seed=seeds)
def test_the_sequence_ratio_is_one_number_per_sequence_between_its_extremes(seed: int) -> None:
    log_ratio, index, mask = sequences(seed)
    result = sequence_ratio(log_ratio, index, mask)
    for number in set(index[mask].tolist()):
        own = (index == number) & mask
        assert len(set(result[index == number].tolist())) == 1
        assert float(log_ratio[own].min()) - 1e-12 <= float(result[own][0]) <= float(log_ratio[own].max()) + 1e-12


@law
@given(seed=seeds, copies=st.integers(2, 5))
def test_the_sequence_ratio_does_not_depend_on_the_length(seed: int, copies: int) -> None:
    log_ratio, index, mask = sequences(seed)
    longer = sequence_ratio(log_ratio.repeat(copies), index.repeat(copies), mask.repeat(copies))
    torch.testing.assert_close(longer[:12], sequence_ratio(log_ratio, index, mask), rtol=1e-12, atol=1e-12)


@law
@given(seed=seeds)
def test_for_sequences_of_one_token_both_ratios_are_the_same(seed: int) -> None:
    log_ratio, _, _ = sequences(seed)
    mask = torch.ones(12, dtype=torch.bool)
    args = (log_ratio, torch.arange(12), mask)
    torch.testing.assert_close(sequence_ratio(*args), token_ratio(*args), rtol=1e-12, atol=1e-12)


@law
@given(first=st.floats(-60, 0), second=st.floats(-60, 0))
def test_a_difference_of_log_probabilities_is_antisymmetric_and_bounded(first: float, second: float) -> None:
    a, b = (torch.tensor([x], dtype=torch.float64) for x in (first, second))
    mask = torch.tensor([True])
    forth, back = clamped_difference(a, b, mask), clamped_difference(b, a, mask)
    assert float(forth) == -float(back) == pytest.approx(max(-20.0, min(20.0, first - second)), abs=1e-12)


Categorical = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def categorical(seed: int, size: int = 5) -> Categorical:
    """Logits with a gradient, log-probabilities of the sampling policy and of the reference."""
    generator = torch.Generator().manual_seed(seed)
    logits, old, ref = torch.randn(3, size, generator=generator, dtype=torch.float64)
    return logits.requires_grad_(), old.log_softmax(0), ref.log_softmax(0)


@pytest.mark.parametrize("name", ["k1_ratio", "k2", "k3_ratio"])
@law
@given(seed=seeds, size=st.integers(2, 9), on_policy=st.booleans())
def test_the_expected_gradient_of_a_kl_loss_is_that_of_the_reverse_kl(
    name: str, seed: int, size: int, on_policy: bool
) -> None:
    logits, old, ref = categorical(seed, size)
    policy = logits.log_softmax(0)
    drawn_from = policy.detach() if on_policy else old
    loss = (drawn_from.exp() * KL_LOSSES[name](policy - ref, policy - drawn_from)).sum()
    (ours,) = torch.autograd.grad(loss, logits, retain_graph=True)
    (exact,) = torch.autograd.grad((policy.exp() * (policy - ref)).sum(), logits)
    torch.testing.assert_close(ours, exact, rtol=1e-6, atol=1e-9)


@law
@given(seed=seeds, size=st.integers(2, 9))
def test_the_expectations_of_k1_and_k3_are_the_kl_itself(seed: int, size: int) -> None:
    logits, _, ref = categorical(seed, size)
    policy = logits.detach().log_softmax(0)
    exact = float(torch.nn.functional.kl_div(ref, policy, log_target=True, reduction="sum"))
    for estimator in (k1, k3):
        assert float((policy.exp() * estimator(policy - ref)).sum()) == pytest.approx(exact, rel=1e-9, abs=1e-12)


@law
@given(d=st.floats(-15, 15).filter(lambda d: d == 0.0 or abs(d) > 1e-150))  # the square of less is 0
def test_k2_and_k3_are_zero_only_where_nothing_differs_and_k3_bounds_k1(d: float) -> None:
    tensor = torch.tensor([d], dtype=torch.float64)
    assert (float(k2(tensor)) == 0.0) == (d == 0.0)
    assert float(k3(tensor)) >= max(0.0, d - 1.0)
    # exp(-d) = 1 - d + d^2 / 2 - d^3 / 6 + ...: above k2 where d < 0, below it where d > 0.
    assert (float(k3(tensor)) - float(k2(tensor))) * d <= 1e-9
    assert float(k1(tensor)) == d


@law
@given(
    coefficient=st.floats(1e-4, 10.0),
    target=st.floats(0.1, 50.0),
    measured=st.floats(0.0, 100.0),
    num_samples=st.integers(1, 2000),
)
def test_the_adaptive_coefficient_moves_toward_its_target_by_at_most_a_fifth(
    coefficient: float, target: float, measured: float, num_samples: int
) -> None:
    controller = KlController(coefficient=coefficient, target=target, horizon=1000)
    after = controller.updated(measured, num_samples).coefficient
    assert (after > coefficient) is (measured > target) or after == pytest.approx(coefficient)
    assert abs(after / coefficient - 1.0) <= 0.2 * min(1.0, num_samples / 1000) + 1e-12


@law
@given(low=st.floats(0.0, 40.0), more=st.floats(0.0, 40.0))
def test_a_larger_kl_never_leads_to_a_smaller_coefficient(low: float, more: float) -> None:
    controller = KlController(coefficient=0.1, target=6.0, horizon=100)
    assert controller.updated(low, 50).coefficient <= controller.updated(low + more, 50).coefficient


def mismatch_inputs(seed: int, *, differ: bool = True) -> LossInputs:
    """Twelve tokens of four sequences, engine and trainer apart."""
    log_ratio, index, mask = sequences(seed)
    zeros = torch.zeros(12, dtype=torch.float64)
    return LossInputs(
        policy_logprobs=zeros,
        entropy=zeros,
        old_logprobs=log_ratio if differ else zeros,
        sampler_logprobs=zeros,
        ref_logprobs=zeros,
        advantages=zeros,
        weights=zeros,
        loss_mask=mask,
        sequence_index=index,
    )


modes = st.sampled_from(["truncate", "mask", "off"])
levels = st.sampled_from(["token", "sequence"])


@law
@given(seed=seeds, mode=modes, level=levels)
def test_where_engine_and_trainer_agree_every_weight_is_one(seed: int, mode: str, level: str) -> None:
    config = RolloutCorrectionConfig(mode=mode, level=level)  # type: ignore[arg-type]
    correction, sums, maxima = mismatch_correction(mismatch_inputs(seed, differ=False), config)
    assert correction.tolist() == [1.0] * 12
    assert [float(sums[f"mismatch/{name}"]) for name in ("mean_abs", "kl", "rejected")] == [0.0] * 3
    assert float(maxima["mismatch/max_abs"]) == 0.0


@law
@given(seed=seeds, mode=modes, level=levels, low=st.floats(0.1, 0.9), high=st.floats(1.1, 4.0))
def test_weights_stay_within_their_bounds_and_the_rest_are_rejected_and_counted(
    seed: int, mode: str, level: str, low: float, high: float
) -> None:
    inputs = mismatch_inputs(seed)
    config = RolloutCorrectionConfig(mode=mode, level=level, low=low, high=high)  # type: ignore[arg-type]
    correction, sums, _ = mismatch_correction(inputs, config)
    kept = correction[inputs.loss_mask]
    if mode == "off":
        assert kept.tolist() == [1.0] * len(kept)
    elif mode == "truncate":
        assert bool(((kept > 0.0) & (kept <= high)).all())
    else:
        assert bool(((kept == 0.0) | ((kept >= low) & (kept <= high))).all())
    assert float(sums["mismatch/rejected"]) == float((kept == 0.0).sum())


@law
@given(seed=seeds, level=levels)
def test_within_the_band_truncating_and_masking_are_the_same(seed: int, level: str) -> None:
    bounds = {"low": 0.0, "high": 1e6}
    truncated, masked = (
        mismatch_correction(mismatch_inputs(seed), RolloutCorrectionConfig(mode=mode, level=level, **bounds))[0]  # type: ignore[arg-type]
        for mode in ("truncate", "mask")
    )
    assert torch.equal(truncated, masked)


@law
@given(seed=seeds, size=st.integers(2, 9))
def test_the_expectation_of_a_token_weight_is_one_for_any_two_distributions(seed: int, size: int) -> None:
    _, old, sampler = categorical(seed, size)
    zeros = torch.zeros(size, dtype=torch.float64)
    inputs = LossInputs(
        policy_logprobs=zeros,
        entropy=zeros,
        old_logprobs=old,
        sampler_logprobs=sampler,
        ref_logprobs=zeros,
        advantages=zeros,
        weights=zeros,
        loss_mask=torch.ones(size, dtype=torch.bool),
        sequence_index=torch.arange(size),
    )
    correction, sums, _ = mismatch_correction(inputs, RolloutCorrectionConfig(high=1e9))
    assert float((sampler.exp() * correction).sum()) == pytest.approx(1.0, abs=1e-12)
    effective = float(sums["mismatch/weight"]) ** 2 / (size * float(sums["mismatch/weight_squared"]))
    assert 0.0 < effective <= 1.0 + 1e-12


values = st.floats(-3, 3)


@law
@given(seed=seeds, shift=st.floats(-5, 5))
def test_explained_variance_is_at_most_one_and_forgives_a_constant_error(seed: int, shift: float) -> None:
    predicted, returns = torch.randn(2, 9, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    assert explained_variance(predicted, returns) <= 1.0
    assert explained_variance(predicted + shift, returns) == pytest.approx(
        explained_variance(predicted, returns), abs=1e-9
    )
    assert explained_variance(returns + shift, returns) == pytest.approx(1.0)


def preference(chosen: float, rejected: float, margin: float = 0.0, probability: float = 1.0) -> float:
    """The loss of one pair of weight 1."""
    sides = (torch.tensor([score], dtype=torch.float64) for score in (chosen, rejected))
    columns = {"margins": margin, "probabilities": probability, "weights": 1.0}
    return float(bradley_terry(*sides, **{key: torch.tensor([x], dtype=torch.float64) for key, x in columns.items()}))


@law
@given(chosen=values, rejected=values, margin=st.floats(0, 2), probability=st.floats(0, 1))
def test_an_uncertain_preference_costs_the_expectation_over_its_label(
    chosen: float, rejected: float, margin: float, probability: float
) -> None:
    expected = probability * preference(chosen, rejected, margin)
    expected += (1 - probability) * preference(rejected, chosen, margin)
    assert preference(chosen, rejected, margin, probability) == pytest.approx(expected, rel=1e-9, abs=1e-12)


@law
@given(chosen=values, rejected=values, shift=values, margin=st.floats(0, 2))
def test_the_preference_loss_looks_at_the_difference_alone(
    chosen: float, rejected: float, shift: float, margin: float
) -> None:
    loss = preference(chosen, rejected, margin)
    assert preference(chosen + shift, rejected + shift, margin) == pytest.approx(loss, rel=1e-9, abs=1e-12)
    assert loss >= preference(chosen, rejected) - 1e-12  # a margin asks for more
    # -log s(x) + log s(-x) = -x: the losses of a pair and of its mirror differ by the difference of the scores.
    assert preference(chosen, rejected) - preference(rejected, chosen) == pytest.approx(rejected - chosen, abs=1e-9)
    assert preference(chosen, chosen) == pytest.approx(math.log(2.0))
    assume(chosen > rejected + 1e-6)
    assert preference(chosen, rejected) < math.log(2.0)

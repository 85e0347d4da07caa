"""The policy loss: its terms, its metrics and the rollout correction."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from rlcore.algorithms.objective import Coefficients, LossInputs, mismatch_correction, policy_loss
from rlcore.algorithms.table import ALGORITHMS
from rlcore.config import RolloutCorrectionConfig

OFF = RolloutCorrectionConfig(mode="off")
PLAIN = Coefficients(kl=0.0, kl_estimator="k3_ratio", entropy=0.0, mismatch=OFF)


def loss_inputs(**fields: Any) -> LossInputs:
    """Inputs of N tokens of one sequence, float64; every field that is not named is neutral."""
    count = len(fields["policy_logprobs"])
    policy = torch.as_tensor(fields.pop("policy_logprobs"), dtype=torch.float64)
    zeros = torch.zeros(count, dtype=torch.float64)
    neutral: dict[str, torch.Tensor] = {
        "policy_logprobs": policy,
        "entropy": zeros,
        "old_logprobs": policy.detach(),
        "sampler_logprobs": policy.detach(),
        "ref_logprobs": policy.detach(),
        "advantages": zeros,
        "weights": torch.full((count,), 1.0 / max(1, count), dtype=torch.float64),
        "loss_mask": torch.ones(count, dtype=torch.bool),
        "sequence_index": torch.zeros(count, dtype=torch.int64),
    }
    given = {
        name: value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=neutral[name].dtype)
        for name, value in fields.items()
    }
    return LossInputs(**(neutral | given))


@pytest.mark.parametrize("name", ["k1_ratio", "k2", "k3_ratio"])
def test_the_kl_term_has_beta_times_the_exact_gradient_also_when_the_engine_differs(name: str) -> None:
    # Every token of a categorical once, weighted with the probability that the *engine* draws it. Three distributions:
    # engine, policy at the start of the update, policy now. The mismatch weight (not truncated here) and the ratio
    # together undo both differences.
    generator = torch.Generator().manual_seed(3)
    logits, old, ref, sampler = torch.randn(4, 6, generator=generator, dtype=torch.float64) * 0.5
    logits.requires_grad_()
    policy, old, ref, sampler = (x.log_softmax(0) for x in (logits, old, ref, sampler))
    inputs = loss_inputs(
        policy_logprobs=policy, old_logprobs=old, ref_logprobs=ref, sampler_logprobs=sampler, weights=sampler.exp()
    )
    mismatch = RolloutCorrectionConfig(mode="truncate", high=1e6)
    coefficients = Coefficients(kl=0.3, kl_estimator=name, entropy=0.0, mismatch=mismatch)
    (ours,) = torch.autograd.grad(policy_loss(inputs, ALGORITHMS["grpo"], coefficients).loss, logits, retain_graph=True)
    (exact,) = torch.autograd.grad((policy.exp() * (policy - ref)).sum(), logits)
    torch.testing.assert_close(ours, 0.3 * exact, rtol=1e-9, atol=1e-12)


def test_the_penalty_gives_the_number_worked_by_hand() -> None:
    # logp -1.8, old -2.1: ratio 1.349859, A 0.2, beta 3: -0.269972 + 3 * (1.349859 - 1 - 0.3) = -0.120395.
    # Gradient: -0.269972 + 3 * (1.349859 - 1) = 0.779604.
    policy = torch.tensor([-1.8], dtype=torch.float64, requires_grad=True)
    inputs = loss_inputs(policy_logprobs=policy, old_logprobs=[-2.1], advantages=[0.2])
    loss = policy_loss(inputs, ALGORITHMS["ppo_penalty"], dataclasses.replace(PLAIN, penalty=3.0)).loss
    assert float(loss.detach()) == pytest.approx(-0.120395, abs=1e-6)
    assert float(torch.autograd.grad(loss, policy)[0]) == pytest.approx(0.779604, abs=1e-6)


def test_the_penalty_is_beta_times_the_kl_from_the_old_policy_and_so_is_its_gradient() -> None:
    # As above: the engine draws the tokens, and the mismatch weight makes them the old policy's.
    generator = torch.Generator().manual_seed(3)
    logits, old, sampler = torch.randn(3, 6, generator=generator, dtype=torch.float64) * 0.5
    logits.requires_grad_()
    policy, old, sampler = (x.log_softmax(0) for x in (logits, old, sampler))
    inputs = loss_inputs(policy_logprobs=policy, old_logprobs=old, sampler_logprobs=sampler, weights=sampler.exp())
    mismatch = RolloutCorrectionConfig(mode="truncate", high=1e6)
    loss = policy_loss(
        inputs, ALGORITHMS["ppo_penalty"], dataclasses.replace(PLAIN, penalty=0.3, mismatch=mismatch)
    ).loss
    exact = (old.exp() * (old - policy)).sum()
    torch.testing.assert_close(loss, 0.3 * exact, rtol=1e-12, atol=1e-14)
    ours, theirs = (torch.autograd.grad(each, logits, retain_graph=True)[0] for each in (loss, 0.3 * exact))
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
    assert float(theirs.norm()) > 0.01


def test_the_entropy_bonus_lowers_the_loss() -> None:
    # Two tokens of weight 1/2 with entropies 1 and 3: the mean is 2, times 0.01.
    coefficients = dataclasses.replace(PLAIN, entropy=0.01)
    inputs = loss_inputs(policy_logprobs=[-1.0, -1.0], entropy=[1.0, 3.0])
    output = policy_loss(inputs, ALGORITHMS["grpo"], coefficients)
    assert float(output.loss) == pytest.approx(-0.02)
    assert float(output.sums["entropy"]) == 4.0


def test_an_unmasked_nan_shows_in_the_loss() -> None:
    for name in ("policy_logprobs", "old_logprobs", "sampler_logprobs", "advantages", "weights"):
        fields: dict[str, Any] = {
            "policy_logprobs": [-1.0, -2.0],
            "advantages": [1.0, 1.0],
            "old_logprobs": [-1.0, -2.0],
        }
        fields["sampler_logprobs"] = [-1.0, -2.0]
        fields[name] = [math.nan, -2.0]
        output = policy_loss(
            loss_inputs(**fields), ALGORITHMS["grpo"], dataclasses.replace(PLAIN, mismatch=RolloutCorrectionConfig())
        )
        assert math.isnan(output.loss), name


def test_the_clip_flags_are_counted_on_unmasked_tokens() -> None:
    # ratios e^0.5 (A > 0: clipped high), e^-0.5 (A < 0: clipped low), e^0.5 (masked)
    inputs = loss_inputs(
        policy_logprobs=[-1.0, -1.5, -1.0],
        old_logprobs=[-1.5, -1.0, -1.5],
        advantages=[1.0, -1.0, 1.0],
        loss_mask=[True, True, False],
    )
    output = policy_loss(inputs, ALGORITHMS["grpo"], PLAIN)
    assert (int(output.sums["clip/high"]), int(output.sums["clip/low"]), output.num_tokens) == (1, 1, 2)


def test_the_reported_divergences_are_the_exact_ones_in_expectation() -> None:
    # Every token of a categorical drawn from the old policy, which is the engine's own: sums weighted with old
    # probabilities are expectations. KL(old || policy) for kl/old, KL(sampler || trainer) for mismatch/kl.
    generator = torch.Generator().manual_seed(5)
    sampler, trainer, policy = torch.randn(3, 5, generator=generator, dtype=torch.float64).log_softmax(1)

    def exact(first: torch.Tensor, second: torch.Tensor) -> float:
        return float((first.exp() * (first - second)).sum())

    def expectation(metric: str, drawn_from: torch.Tensor, **fields: torch.Tensor) -> float:
        total = 0.0
        for token in range(5):
            one = {name: value[token : token + 1] for name, value in fields.items()}
            output = policy_loss(loss_inputs(**one), ALGORITHMS["grpo"], PLAIN)
            total += float(drawn_from[token].exp() * output.sums[metric])
        return total

    kl_old = expectation("kl/old", trainer, policy_logprobs=policy, old_logprobs=trainer)
    assert kl_old == pytest.approx(exact(trainer, policy), rel=1e-9)
    mismatch = expectation(
        "mismatch/kl", sampler, policy_logprobs=trainer, old_logprobs=trainer, sampler_logprobs=sampler
    )
    assert mismatch == pytest.approx(exact(sampler, trainer), rel=1e-9)


THREE = ([-1.0, -1.0, -4.0], [-1.1, -2.0, -1.0])  # e^0.1 = 1.1052, e^1 = 2.7183, e^-3 = 0.0498
# Sequence 0: differences 3 and 0, mean 1.5, weight 4.48; sequence 1: mean -1, weight 0.3679; sequence 2: 0.1.
SEQUENCES = ([-1.0] * 5, [-4.0, -1.0, 0.5, -0.5, -1.1])
BY_SEQUENCE = {"level": "sequence", "low": 0.5, "high": 2.0}


@pytest.mark.parametrize(
    ("config", "logprobs", "expected"),
    [
        ({}, ([-1.0], [-2.5]), [2.0]),  # on by default, with an upper bound of 2: e^1.5 = 4.48
        ({"mode": "truncate", "high": 2.0}, THREE, [1.1052, 2.0, 0.0498]),
        ({"mode": "mask", "low": 0.5, "high": 2.0}, THREE, [1.1052, 0.0, 0.0]),
        ({"mode": "mask"}, ([-1.0, -1.0], [-2.5, -2.7]), [4.4817, 0.0]),  # by default up to 5: e^1.7 = 5.47
        ({"mode": "mask", "low": 1.0, "high": 2.0}, ([-1.0], [-1.0]), [1.0]),  # at a bound it is kept
        ({"mode": "mask", "low": 0.5, "high": 1.0}, ([-1.0], [-1.0]), [1.0]),
        ({"mode": "truncate", **BY_SEQUENCE}, SEQUENCES, [2.0, 2.0, 0.3679, 0.3679, 1.1052]),
        ({"mode": "mask", **BY_SEQUENCE}, SEQUENCES, [0.0, 0.0, 0.0, 0.0, 1.1052]),
        ({"mode": "off", **BY_SEQUENCE}, SEQUENCES, [1.0] * 5),
    ],
)
def test_mismatch_weights_by_hand(
    config: Any, logprobs: tuple[list[float], list[float]], expected: list[float]
) -> None:
    index = [0, 0, 1, 1, 2][: len(expected)]
    old, sampler = logprobs
    inputs = loss_inputs(policy_logprobs=old, old_logprobs=old, sampler_logprobs=sampler, sequence_index=index)
    weights, sums, _ = mismatch_correction(inputs, RolloutCorrectionConfig(**config))
    assert weights.tolist() == pytest.approx(expected, abs=5e-5)
    assert float(sums["mismatch/rejected"]) == expected.count(0.0)


def test_terms_without_coefficient_are_not_read() -> None:
    nan = [math.nan, math.nan]
    inputs = loss_inputs(policy_logprobs=[-1.0, -2.0], advantages=[1.0, -2.0], ref_logprobs=nan, entropy=nan)
    assert float(policy_loss(inputs, ALGORITHMS["grpo"], PLAIN).loss) == pytest.approx(0.5)  # -(1 - 2) / 2


def test_rejected_tokens_stay_in_the_denominator() -> None:
    # Two tokens of weight 1/2, advantage 1, ratio 1: loss -1. With the second rejected: -1/2, not -1.
    config = dataclasses.replace(PLAIN, mismatch=RolloutCorrectionConfig(mode="mask", low=0.5, high=2.0))
    inputs = loss_inputs(policy_logprobs=[-1.0, -1.0], sampler_logprobs=[-1.0, -9.0], advantages=[1.0, 1.0])
    assert float(policy_loss(inputs, ALGORITHMS["grpo"], config).loss) == pytest.approx(-0.5)


def test_a_masked_token_is_outside_of_the_sequence_weight() -> None:
    # Differences 0.4 and -0.1 of sequence 0: mean 0.15; the masked 7.0 does not count. Sequence 1: 0.2.
    inputs = loss_inputs(
        policy_logprobs=[-1.0] * 4,
        sampler_logprobs=[-1.4, -0.9, -8.0, -1.2],
        loss_mask=[True, True, False, True],
        sequence_index=[0, 0, 0, 1],
    )
    weights, *_ = mismatch_correction(inputs, RolloutCorrectionConfig(mode="truncate", level="sequence", high=2.0))
    assert weights[[0, 1, 3]].tolist() == pytest.approx([math.exp(0.15), math.exp(0.15), math.exp(0.2)])


def test_the_effective_sample_size_comes_from_the_sums_of_weights_and_squares() -> None:
    # weights 1 and 2: (1 + 2)^2 / (2 * (1 + 4)) = 0.9
    inputs = loss_inputs(policy_logprobs=[-1.0, -1.0], sampler_logprobs=[-1.0, -1.0 - math.log(2.0)])
    _, sums, maxima = mismatch_correction(inputs, OFF)
    assert float(sums["mismatch/weight"]) == pytest.approx(3.0)
    assert float(sums["mismatch/weight_squared"]) == pytest.approx(5.0)
    assert float(maxima["mismatch/max_abs"]) == pytest.approx(math.log(2.0))


def test_a_micro_batch_without_tokens_has_loss_and_figures_of_zero() -> None:
    empty = torch.empty(0, dtype=torch.float64)
    inputs = loss_inputs(policy_logprobs=empty, weights=empty)
    output = policy_loss(
        inputs, ALGORITHMS["grpo"], dataclasses.replace(PLAIN, kl=0.1, mismatch=RolloutCorrectionConfig())
    )
    assert (float(output.loss), output.num_tokens) == (0.0, 0)
    assert {float(value) for value in (*output.sums.values(), *output.maxima.values())} == {0.0}


def test_a_masked_token_counts_in_no_metric() -> None:
    # One token of two is tool output: the sums are those of the other one alone.
    inputs = loss_inputs(
        policy_logprobs=[-1.0, -2.0],
        old_logprobs=[-1.5, -9.0],
        sampler_logprobs=[-1.5, -7.0],
        ref_logprobs=[-1.2, -8.0],
        entropy=[0.7, 5.0],
        advantages=[1.0, 3.0],
        loss_mask=[True, False],
    )
    coefficients = dataclasses.replace(PLAIN, kl=0.1)
    output = policy_loss(inputs, ALGORITHMS["grpo"], coefficients)
    alone = policy_loss(
        loss_inputs(
            policy_logprobs=[-1.0],
            old_logprobs=[-1.5],
            sampler_logprobs=[-1.5],
            ref_logprobs=[-1.2],
            entropy=[0.7],
            advantages=[1.0],
            weights=[0.5],
        ),
        ALGORITHMS["grpo"],
        coefficients,
    )
    assert output.num_tokens == 1
    assert {name: float(value) for name, value in output.sums.items()} == pytest.approx(
        {name: float(value) for name, value in alone.sums.items()}
    )
    assert float(output.sums["entropy"]) == pytest.approx(0.7)
    assert float(output.loss) == pytest.approx(float(alone.loss))


def test_without_a_reference_there_is_no_kl_to_it() -> None:
    inputs = loss_inputs(policy_logprobs=[-1.0], ref_logprobs=[0.0], advantages=[1.0])
    assert "kl/ref" not in policy_loss(inputs, ALGORITHMS["grpo"], PLAIN).sums
    assert "kl/ref" in policy_loss(inputs, ALGORITHMS["grpo"], dataclasses.replace(PLAIN, kl=1e-9)).sums


def test_mismatch_is_measured_by_absolute_value() -> None:
    # old - sampler = -0.5 and +0.1: mean size 0.3 over two tokens, largest 0.5.
    inputs = loss_inputs(policy_logprobs=[-1.5, -1.0], old_logprobs=[-1.5, -1.0], sampler_logprobs=[-1.0, -1.1])
    output = policy_loss(inputs, ALGORITHMS["grpo"], dataclasses.replace(PLAIN, mismatch=RolloutCorrectionConfig()))
    assert float(output.sums["mismatch/mean_abs"]) == pytest.approx(0.6)
    assert float(output.maxima["mismatch/max_abs"]) == pytest.approx(0.5)

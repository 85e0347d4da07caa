"""KL estimators and losses against the exact gradient over a small categorical, where every token can be enumerated."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch

from rlcore.algorithms.kl import KL_LOSSES, KlController, KlLossFn, PenaltyController, k1

Categorical = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def categorical(seed: int) -> Categorical:
    """Logits of the policy (with gradient), log-probabilities of the old policy and of the reference; float64 [7]."""
    generator = torch.Generator().manual_seed(seed)
    logits, old, reference = torch.randn(3, 7, generator=generator, dtype=torch.float64)
    return logits.requires_grad_(), old.log_softmax(0), reference.log_softmax(0)


def gradient(loss: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Gradient of a scalar with respect to the logits."""
    return torch.autograd.grad(loss, logits)[0]


def exact_gradient(logits: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Gradient of the reverse KL, ``sum p (log p - log ref)``."""
    logprobs = logits.log_softmax(0)
    return gradient((logprobs.exp() * (logprobs - reference)).sum(), logits)


def expected_gradient(
    function: KlLossFn, logits: torch.Tensor, sampled_from: torch.Tensor, reference: torch.Tensor
) -> torch.Tensor:
    """The expectation, over tokens drawn from ``sampled_from``, of the gradient of a per-token loss."""
    logprobs = logits.log_softmax(0)
    per_token = function(logprobs - reference, logprobs - sampled_from)
    return gradient((sampled_from.exp() * per_token).sum(), logits)


def plain(estimator: Callable[[torch.Tensor], torch.Tensor]) -> KlLossFn:
    """An estimator used as a loss without the ratio."""
    return lambda d, log_ratio: estimator(d)


def test_plain_k1_has_zero_gradient() -> None:
    logits, _, reference = categorical(0)
    result = expected_gradient(plain(k1), logits, logits.detach().log_softmax(0), reference)
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
    forward = gradient((reference.exp() * (reference - logits.log_softmax(0))).sum(), logits)
    torch.testing.assert_close(result, forward, rtol=1e-10, atol=1e-12)
    assert float((result - exact_gradient(logits, reference)).norm()) > 0.01


@pytest.mark.parametrize("name", sorted(KL_LOSSES))
def test_a_token_that_the_policy_has_dropped_keeps_its_gradient(name: str) -> None:
    # k3 of d = -15 is 3 million: a clamp of its value would remove the gradient just where it is needed.
    d = torch.tensor([-15.0], dtype=torch.float64, requires_grad=True)
    loss = KL_LOSSES[name](d, d - d.detach())
    assert abs(float(torch.autograd.grad(loss, d)[0])) > 1.0


@pytest.mark.parametrize("name", sorted(KL_LOSSES))
def test_every_kl_loss_gives_the_number_worked_by_hand(name: str) -> None:
    # d = ln 2, ratio 1.5: k1 = 0.6931, k2 = 0.2402, k3 = 0.1931; times 1.5: 1.0397, 0.3603, 0.2897.
    d, log_ratio = torch.tensor([[2.0], [1.5]], dtype=torch.float64).log()
    expected = {"k1_ratio": 1.0397, "k2": 0.3603, "k3_ratio": 0.2897, "k2_plain": 0.2402, "k3_plain": 0.1931}
    assert float(KL_LOSSES[name](d, log_ratio)) == pytest.approx(expected[name], abs=5e-5)


def test_a_fixed_coefficient_does_not_move() -> None:
    controller = KlController(coefficient=0.1)
    assert controller.updated(5.0, 64) is controller


def test_the_adaptive_coefficient_moves_by_the_clipped_error() -> None:
    # target 6, measured 6.6: error 0.1, 64 of 640 samples: factor 1 + 0.1 * 0.1 = 1.01.
    controller = KlController(coefficient=0.2, target=6.0, horizon=640)
    assert controller.updated(6.6, 64).coefficient == pytest.approx(0.2 * 1.01)
    # measured 60: the error 9 is clipped to 0.2: factor 1.02. Measured 0: -0.2, factor 0.98.
    assert controller.updated(60.0, 64).coefficient == pytest.approx(0.2 * 1.02)
    assert controller.updated(0.0, 64).coefficient == pytest.approx(0.2 * 0.98)
    assert dataclasses.replace(controller, coefficient=0.3).target == 6.0


def test_the_horizon_is_ten_thousand_completions_unless_set() -> None:
    # Error clipped to 0.2; 1,000 of 10,000 completions: factor 1 + 0.2 * 0.1 = 1.02.
    assert KlController(coefficient=1.0, target=1.0).updated(9.0, 1000).coefficient == pytest.approx(1.02, rel=1e-12)


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
def test_the_penalty_is_halved_or_doubled_beyond_the_bounds_and_not_at_them(measured: float, factor: float) -> None:
    controller = PenaltyController(coefficient=0.7, target=0.03)
    assert controller.updated(measured) == dataclasses.replace(controller, coefficient=0.7 * factor)

"""KL estimators, entropy and the critic's loss against verl's and OpenRLHF's: value and gradient in float64."""

from __future__ import annotations

import pytest
import torch
import verl.trainer.ppo.core_algos as verl_algos
from verl.utils.torch_functional import entropy_from_logits, logprobs_from_logits_naive

from rlcore.algorithms.kl import k1, k2, k2_loss, k3
from rlcore.algorithms.values import value_loss
from rlcore.algorithms.weighting import token_mean
from rlcore.models.logprobs import chunked_logprobs
from tests import strategies
from tests.peers import openrlhf_functions as openrlhf
from tests.peers.tensors import assert_equal, draw

pytestmark = pytest.mark.peers

ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}


def gradient_of(output: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
    """The gradient of the sum of ``output``."""
    (gradient,) = torch.autograd.grad(output.sum(), leaf)
    return gradient


@pytest.mark.parametrize("name", ESTIMATORS)
def test_kl_estimators_equal_verls_and_openrlhfs(name: str) -> None:
    rollouts = draw(0)
    logprobs = rollouts.policy_logprobs.clone().requires_grad_(True)
    ours = ESTIMATORS[name](logprobs - rollouts.ref_logprobs)
    theirs = verl_algos.kl_penalty(logprobs, rollouts.ref_logprobs, name)
    assert_equal(ours.detach(), theirs.detach(), 1e-12)
    assert_equal(gradient_of(ours, logprobs), gradient_of(theirs, logprobs), 1e-12)
    # OpenRLHF computes in float32.
    others = openrlhf.utils.compute_approx_kl(logprobs.detach(), rollouts.ref_logprobs, kl_estimator=name)
    assert_equal(ours.detach(), others, 1e-6)


def test_the_kl_loss_with_the_right_gradient_equals_verls_straight_through_form_on_policy() -> None:
    # "k3+" has k3's value and k2's gradient; on policy the importance weight of our k2 loss is 1.
    rollouts = draw(0)
    logprobs = rollouts.policy_logprobs.clone().requires_grad_(True)
    theirs = verl_algos.kl_penalty(logprobs, rollouts.ref_logprobs, "k3+")
    ours = k2_loss(logprobs - rollouts.ref_logprobs, torch.zeros_like(logprobs))
    assert_equal(gradient_of(ours, logprobs), gradient_of(theirs, logprobs), 1e-12)


def test_the_kl_loss_off_policy_has_openrlhfs_unbiased_gradient() -> None:
    rollouts = draw(0)
    logprobs = rollouts.policy_logprobs.clone().requires_grad_(True)
    theirs = openrlhf.utils.compute_approx_kl(
        logprobs, rollouts.ref_logprobs, log_probs_old=rollouts.old_logprobs, kl_estimator="k3", unbiased_gradient=True
    )
    ours = k2_loss(logprobs - rollouts.ref_logprobs, logprobs - rollouts.old_logprobs)
    assert_equal(gradient_of(ours, logprobs), gradient_of(theirs, logprobs), 1e-6)  # theirs is float32


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_and_entropy_equal_verls(temperature: float) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(13, 8, generator=generator, dtype=torch.float64).requires_grad_(True)
    head = torch.randn(31, 8, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, 31, (13,), generator=generator)
    logprobs, entropy = chunked_logprobs(
        hidden, head, targets, temperature=temperature, chunk_size=5, entropy_gradient=True
    )
    logits = hidden @ head.T / temperature
    pairs = ((logprobs, logprobs_from_logits_naive(logits, targets)), (entropy, entropy_from_logits(logits)))
    for ours, theirs in pairs:
        assert_equal(ours.detach(), theirs.detach(), 1e-12)
        first, second = (torch.autograd.grad(side.sum(), hidden, retain_graph=True)[0] for side in (ours, theirs))
        assert_equal(first, second, 1e-12)


@pytest.mark.parametrize("clip_range", [0.1, 0.5])
def test_the_critics_loss_equals_verls_and_openrlhfs(clip_range: float) -> None:
    for seed in range(5):
        rollouts = draw(seed)
        old, returns, mask = rollouts.values, rollouts.values + rollouts.advantages, rollouts.mask
        values = (old + rollouts.policy_logprobs - rollouts.old_logprobs).requires_grad_(True)
        ours = (
            token_mean(mask, strategies.one_each(mask)) * value_loss(values, old, returns, clip_range=clip_range)
        ).sum()
        theirs, _ = verl_algos.compute_value_loss(values, returns, old, mask.double(), clip_range)
        others = openrlhf.losses.ValueLoss(clip_eps=clip_range)(values, old, returns, mask.double())
        for peer in (theirs, others):
            assert_equal(ours.detach(), peer.detach(), 1e-7)
            first, second = (torch.autograd.grad(side, values, retain_graph=True)[0] for side in (ours, peer))
            assert_equal(first, second, 1e-7)

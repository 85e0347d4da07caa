"""Our policy losses against verl's and OpenRLHF's: the same log-probabilities, loss and gradient in float64.

Bound: 1e-7 of values of order 1. verl and OpenRLHF add 1e-8 to the token counts of their means, and our weights are
float32.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
import verl.trainer.ppo.core_algos as verl_algos
from verl.workers.config import ActorConfig

from rlcore.algorithms import table
from rlcore.algorithms.objective import policy_loss
from rlcore.algorithms.surrogates import (
    SurrogateFn,
    cispo,
    dppo_tv,
    ppo_clip,
    reinforce,
    sapo,
    sequence_ratio,
    token_ratio,
)
from rlcore.algorithms.table import ALGORITHMS, Algorithm
from tests import strategies
from tests.peers import openrlhf_functions as openrlhf
from tests.peers.tensors import NO_EXTRAS, Padded, assert_equal, draw

pytestmark = pytest.mark.peers

BOUND = 1e-7
SEEDS = range(5)
NO_DUAL_CLIP = 1e9  # verl's PPO always has a dual clip (c = 3 by default); this moves it out of the way
#: our weighting, and verl's name for it
AGGREGATIONS = {
    "token-mean": table.token_mean,
    "seq-mean-token-mean": table.sequence_mean,
    "seq-mean-token-sum-norm": partial(table.constant, constant_length=9),  # verl takes the padded width, here 9
}


def with_gradient(logprobs: torch.Tensor) -> torch.Tensor:
    return logprobs.clone().requires_grad_(True)


def of_ours(rollouts: Padded, algorithm: Algorithm) -> tuple[torch.Tensor, torch.Tensor]:
    logprobs = with_gradient(rollouts.policy_logprobs)
    inputs = rollouts.loss_inputs(logprobs, algorithm.weighting(rollouts.mask, strategies.one_each(rollouts.mask)))
    loss = policy_loss(inputs, algorithm, NO_EXTRAS).loss
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return loss.detach(), gradient


def of_verl(rollouts: Padded, name: str, mode: str, **settings: float) -> tuple[torch.Tensor, torch.Tensor]:
    required = {"strategy": "fsdp", "rollout_n": 4, "ppo_micro_batch_size_per_gpu": 1}
    config = ActorConfig(**(required | {"clip_ratio_c": NO_DUAL_CLIP} | settings))
    logprobs = with_gradient(rollouts.policy_logprobs)
    compute = verl_algos.get_policy_loss_fn(name)
    loss, _ = compute(
        old_log_prob=rollouts.old_logprobs,
        log_prob=logprobs,
        advantages=rollouts.advantages,
        response_mask=rollouts.mask.double(),
        loss_agg_mode=mode,
        config=config,
    )
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return loss.detach(), gradient


def of_openrlhf(rollouts: Padded, **settings: object) -> tuple[torch.Tensor, torch.Tensor]:
    logprobs = with_gradient(rollouts.policy_logprobs)
    compute = openrlhf.losses.PolicyLoss(**settings)
    loss = compute(logprobs, rollouts.old_logprobs, rollouts.advantages, action_mask=rollouts.mask.double())[0]
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return loss.detach(), gradient


def assert_same(first: tuple[torch.Tensor, torch.Tensor], second: tuple[torch.Tensor, torch.Tensor]) -> None:
    for mine, theirs in zip(first, second, strict=True):
        assert_equal(mine, theirs, BOUND)


def row(surrogate: SurrogateFn, mode: str, *, sequence: bool = False) -> Algorithm:
    ratio = sequence_ratio if sequence else token_ratio
    return replace(ALGORITHMS["grpo"], surrogate=surrogate, ratio=ratio, weighting=AGGREGATIONS[mode])


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize(("low", "high"), [(0.2, 0.2), (0.2, 0.28), (0.1, 0.3)])
def test_the_clipped_loss_equals_verls(mode: str, low: float, high: float) -> None:
    surrogate = partial(ppo_clip, clip_low=low, clip_high=high)
    for seed in SEEDS:
        rollouts = draw(seed, tool_output=True)
        theirs = of_verl(rollouts, "vanilla", mode, clip_ratio_low=low, clip_ratio_high=high)
        assert_same(of_ours(rollouts, row(surrogate, mode)), theirs)


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_the_cispo_loss_equals_verls(mode: str) -> None:
    for seed in SEEDS:
        rollouts = draw(seed)
        theirs = of_verl(rollouts, "cispo", mode, clip_ratio_low=0.3, clip_ratio_high=0.28)
        assert_same(of_ours(rollouts, row(partial(cispo, clip_low=0.3, clip_high=0.28), mode)), theirs)


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_the_dual_clip_equals_verls_and_openrlhfs(mode: str) -> None:
    surrogate = partial(ppo_clip, clip_low=0.2, clip_high=0.2, dual_clip=1.5)
    for seed in SEEDS:
        rollouts = draw(seed, drift=0.6)
        mine = of_ours(rollouts, row(surrogate, mode))
        assert_same(mine, of_verl(rollouts, "vanilla", mode, clip_ratio_c=1.5))
        if mode == "token-mean":
            assert_same(mine, of_openrlhf(rollouts, dual_clip=1.5))


def test_the_soft_gate_equals_verls() -> None:
    # verl aggregates SAPO by seq-mean-token-mean whatever the mode.
    surrogate = partial(sapo, gate_positive=1.0, gate_negative=1.05)
    for seed in SEEDS:
        rollouts = draw(seed, drift=0.6)
        theirs = of_verl(rollouts, "sapo", "seq-mean-token-mean", tau_pos=1.0, tau_neg=1.05)
        assert_same(of_ours(rollouts, row(surrogate, "seq-mean-token-mean")), theirs)


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_the_gradient_of_the_mask_by_probability_equals_verls(mode: str) -> None:
    # verl writes the loss as detached ratio times log-probability: the gradient is that of the ratio, the value is not.
    surrogate = partial(dppo_tv, clip_low=0.05, clip_high=0.05)
    for seed in SEEDS:
        rollouts = draw(seed, drift=0.6)
        theirs = of_verl(rollouts, "dppo_tv", mode, clip_ratio_low=0.05, clip_ratio_high=0.05)
        assert_equal(of_ours(rollouts, row(surrogate, mode))[1], theirs[1], BOUND)


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_the_sequence_ratio_loss_equals_verls(mode: str) -> None:
    # verl lets the gradient of a token's loss flow through that token alone (GSPO-token, eq. 13-14 of the paper), we
    # let it flow through the mean over the sequence. With one advantage per completion the sums agree.
    for seed in SEEDS:
        rollouts = draw(seed, drift=0.1)
        theirs = of_verl(rollouts, "gspo", mode, clip_ratio_low=0.05, clip_ratio_high=0.04)
        surrogate = partial(ppo_clip, clip_low=0.05, clip_high=0.04)
        assert_same(of_ours(rollouts, row(surrogate, mode, sequence=True)), theirs)


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_the_reinforce_loss_equals_verls(mode: str) -> None:
    config = ActorConfig(strategy="fsdp", rollout_n=4, ppo_micro_batch_size_per_gpu=1)
    for seed in SEEDS:
        rollouts = draw(seed, drift=0.0)  # verl's has no ratio
        logprobs = with_gradient(rollouts.policy_logprobs)
        loss, _ = verl_algos.compute_policy_loss_reinforce(
            rollouts.old_logprobs, logprobs, rollouts.advantages, rollouts.mask.double(), mode, config
        )
        (gradient,) = torch.autograd.grad(loss, logprobs)
        surrogate = partial(reinforce, clip_low=0.2, clip_high=0.2)
        assert_same(of_ours(rollouts, row(surrogate, mode)), (loss.detach(), gradient))


@pytest.mark.parametrize(("mode", "token_level"), [("token-mean", True), ("seq-mean-token-mean", False)])
def test_the_clipped_loss_equals_openrlhfs(mode: str, token_level: bool) -> None:
    surrogate = partial(ppo_clip, clip_low=0.2, clip_high=0.28)
    for seed in SEEDS:
        rollouts = draw(seed, tool_output=True)
        theirs = of_openrlhf(rollouts, clip_eps_low=0.2, clip_eps_high=0.28, token_level_loss=token_level)
        assert_same(of_ours(rollouts, row(surrogate, mode)), theirs)


def test_the_sequence_ratio_loss_equals_openrlhfs() -> None:
    surrogate = partial(ppo_clip, clip_low=0.05, clip_high=0.04)
    for seed in SEEDS:
        rollouts = draw(seed, drift=0.1)
        theirs = of_openrlhf(rollouts, clip_eps_low=0.05, clip_eps_high=0.04, policy_loss_type="gspo")
        assert_same(of_ours(rollouts, row(surrogate, "seq-mean-token-mean", sequence=True)), theirs)


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_aggregation_equals_verls_with_a_completion_that_is_masked_as_a_whole(mode: str) -> None:
    rollouts = draw(0)
    mask = rollouts.mask.clone()
    mask[3] = False
    theirs = verl_algos.agg_loss(rollouts.values, mask.double(), mode)
    assert_equal((AGGREGATIONS[mode](mask) * rollouts.values).sum(), theirs, BOUND)

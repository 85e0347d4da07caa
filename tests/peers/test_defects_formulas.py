"""Known defects of formulas: whether the peers, as installed, have them, and that ours does not."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import verl.trainer.ppo.core_algos as verl_algos

from rlcore.algorithms import advantages
from rlcore.algorithms.kl import k3_ratio_loss
from rlcore.algorithms.weighting import sequence_mean, token_mean
from tests import strategies
from tests.peers import openrlhf_functions as openrlhf
from tests.peers.conftest import Record
from tests.peers.trl_trainers import EOS, make_trainer, tiny_model

pytestmark = pytest.mark.peers


def largest(values: torch.Tensor) -> float:
    """The largest absolute value."""
    return float(values.abs().max())


def test_eight_equal_rewards_have_no_advantage(record: Record) -> None:
    rewards = [0.7] * 8
    ours = largest(advantages.group_normalized(strategies.episodes(rewards)))
    assert ours == 0.0
    column, one_token = torch.tensor(rewards)[:, None], torch.ones(8, 1)
    verls, _ = verl_algos.compute_grpo_outcome_advantage(column.clone(), one_token, np.array(["a"] * 8, dtype=object))
    trainer = make_trainer(tiny_model(), rewards, [[9, EOS]] * 8)
    trainer.train()
    others = openrlhf.advantages(column[:, 0], group_size=8, estimator="group_norm", mask=one_token.bool())
    for peer, theirs in (("verl", verls), ("trl", trainer.seen[0]["advantages"]), ("openrlhf", others)):
        size = largest(theirs)
        record(
            "advantage of eight rewards of 0.7 (must be 0)",
            peer,
            theirs=f"{size:.3g}",
            ours=f"{ours:g}",
            reproduced=size > 0.0,
        )


def test_gae_steps_over_tool_output(record: Record) -> None:
    # Three tokens of the policy, two of a tool between the first and the second. By hand, gamma 1, lam 0.95:
    # on the compressed sequence V = (0.5, 0.4, 0.6), r = (0, 0, 1): delta = (-0.1, 0.2, 0.4);
    # A = (-0.1 + 0.95 * 0.58, 0.2 + 0.95 * 0.4, 0.4) = (0.451, 0.58, 0.4).
    values = torch.tensor([[0.5, 0.0, 0.0, 0.4, 0.6]], dtype=torch.float64)
    rewards = torch.tensor([[0.0, 0.0, 0.0, 0.0, 1.0]], dtype=torch.float64)
    mask = torch.tensor([[True, False, False, True, True]])
    episodes = strategies.episodes([1.0], mask=mask, token_rewards=rewards, values=values)
    ours = float(advantages.gae(episodes, gamma=1.0, lam=0.95)[0, 0])
    assert ours == pytest.approx(0.451, abs=1e-6)
    _, returns = verl_algos.compute_gae_advantage_return(rewards, values, mask.double(), 1.0, 0.95)
    theirs = {
        "verl": float((returns - values)[0, 0]),
        "openrlhf": float(openrlhf.gae(values, rewards, mask.double(), gamma=1.0, lam=0.95)[0, 0]),
    }
    for peer, found in theirs.items():
        record(
            "GAE of the token before a tool's output (0.451 on the compressed sequence)",
            peer,
            theirs=f"{found:.3f}",
            ours=f"{ours:.3f}",
            reproduced=abs(found - 0.451) > 1e-4,
        )


def test_the_kl_term_pulls_back_a_token_that_the_policy_has_dropped(record: Record) -> None:
    # ref gives the token 0.5, the policy e^-13: k3 is 3e5. A clamp of its value takes the gradient away.
    ref = torch.tensor([math.log(0.5)], dtype=torch.float64)
    logprob = torch.tensor([-13.0], dtype=torch.float64, requires_grad=True)
    (ours,) = torch.autograd.grad(k3_ratio_loss(logprob - ref, logprob - logprob.detach()).sum(), logprob)
    assert abs(float(ours)) > 1.0
    estimates = {
        "verl": verl_algos.kl_penalty(logprob, ref, "k3"),
        "openrlhf": openrlhf.utils.compute_approx_kl(logprob, ref, kl_estimator="k3"),
    }
    for peer, estimate in estimates.items():
        (found,) = torch.autograd.grad(estimate.sum(), logprob)
        record(
            "gradient of the k3 loss on a token at log-ratio -12.3 (must not vanish)",
            peer,
            theirs=f"{float(found):g}",
            ours=f"{float(ours):.3g}",
            reproduced=float(found) == 0.0,
        )


def test_the_kl_loss_has_the_gradient_of_the_reverse_kl(record: Record) -> None:
    # Exact over three tokens: policy p, reference q; dKL(p||q)/dlogits against the expected gradient of each loss.
    logits = torch.tensor([1.0, 0.0, -1.0], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([-1.0, 0.5, 0.5], dtype=torch.float64).log_softmax(-1)
    logprobs = logits.log_softmax(-1)
    probabilities = logprobs.detach().exp()

    def expected_gradient(per_token: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad((probabilities * per_token).sum(), logits, retain_graph=True)[0]

    (exact,) = torch.autograd.grad((logprobs.exp() * (logprobs - ref)).sum(), logits, retain_graph=True)
    ours = expected_gradient(k3_ratio_loss(logprobs - ref, logprobs - logprobs.detach()))
    assert float((ours - exact).norm()) < 1e-9
    estimates = {
        "verl": verl_algos.kl_penalty(logprobs, ref, "low_var_kl"),  # the default of actor.kl_loss_type
        "openrlhf": openrlhf.utils.compute_approx_kl(logprobs, ref, kl_estimator="k3"),
    }
    for peer, estimate in estimates.items():
        cosine = float(torch.cosine_similarity(expected_gradient(estimate), exact, dim=0))
        error = float((expected_gradient(estimate) - exact).norm() / exact.norm())
        record(
            "k3 as a loss: relative error of its expected gradient against that of the reverse KL",
            peer,
            theirs=f"{error:.2f} (cosine {cosine:.2f})",
            ours=f"{float((ours - exact).norm() / exact.norm()):.0e}",
            reproduced=error > 1e-6,
        )


def test_the_mean_over_tokens_does_not_depend_on_micro_batches(record: Record) -> None:
    # Completions of 1 and 9 tokens with losses 1 and 0 per token: 1/10 together, (1 + 0) / 2 as a mean of means.
    loss = torch.tensor([[1.0] * 9, [0.0] * 9], dtype=torch.float64)
    mask = torch.tensor([[True] + [False] * 8, [True] * 9])
    weights = token_mean(mask, strategies.one_each(mask))
    ours = sum(float((weights[i] * loss[i]).sum()) for i in range(2))
    assert ours == pytest.approx(0.1)
    alone = [verl_algos.agg_loss(loss[i : i + 1], mask[i : i + 1].double(), "token-mean") for i in range(2)]
    told = [
        verl_algos.agg_loss(loss[i : i + 1], mask[i : i + 1].double(), "token-mean", batch_num_tokens=10)
        for i in range(2)
    ]
    record(
        "token mean of two micro-batches (0.1); the micro-batch alone is known",
        "verl",
        theirs=f"{float(sum(alone)) / 2:g}",
        ours=f"{ours:g}",
        reproduced=float(sum(alone)) / 2 != pytest.approx(0.1),
    )
    record(
        "token mean of two micro-batches (0.1); its trainer passes the batch's tokens",
        "verl",
        theirs=f"{float(sum(told)):g}",
        ours=f"{ours:g}",
        reproduced=float(sum(told)) != pytest.approx(0.1),
    )


def test_a_completion_that_is_masked_as_a_whole_is_in_no_denominator(record: Record) -> None:
    # Three completions of loss 1 and a dropped one: the mean over sequences is 1. verl's trainer passes the size of the
    # mini-batch, which counts the dropped one.
    loss = torch.ones(4, 2, dtype=torch.float64)
    mask = torch.tensor([[True, True]] * 3 + [[False, False]])
    ours = float((sequence_mean(mask, strategies.one_each(mask)) * loss).sum())
    assert ours == pytest.approx(1.0)
    theirs = float(verl_algos.agg_loss(loss, mask.double(), "seq-mean-token-mean", global_batch_size=4))
    record(
        "mean over sequences of loss 1 with a dropped fourth, as its trainer calls it",
        "verl",
        theirs=f"{theirs:g}",
        ours=f"{ours:g}",
        reproduced=theirs != pytest.approx(1.0),
    )

"""Whole rows: expected gradients by enumeration, and plain loops over ragged batches with tool output."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.algorithms import advantages
from rlcore.algorithms.advantages import AdvantageInputs
from rlcore.algorithms.objective import Coefficients, LossInputs, policy_loss, value_loss
from rlcore.algorithms.table import ALGORITHMS, Algorithm, with_constants
from rlcore.config import RolloutCorrectionConfig
from tests import strategies
from tests.reference import iteration
from tests.reference.table_policy import TablePolicy, Tokens
from tests.rlcore.algorithms.test_objective import loss_inputs

ALONE = Coefficients(kl=0.0, kl_estimator="k2", entropy=0.0, mismatch=RolloutCorrectionConfig(mode="off"))


def expected_gradient(
    row: Algorithm, policy: TablePolicy, old: TablePolicy, rewards: Mapping[Tokens, float], *, size: int
) -> torch.Tensor:
    """The gradient of the row's loss, each group of ``size`` completions weighted by how likely ``old`` draws it."""
    parts: dict[str, list[torch.Tensor]] = {name: [] for name in ("policy", "old", "advantages", "weights", "index")}
    known = {one: (policy.logprobs(one), old.logprobs(one).detach()) for one in rewards}
    sequence = 0
    for group in product(rewards, repeat=size):
        mask = torch.arange(policy.longest) < torch.tensor([len(one) for one in group])[:, None]
        chance = float(torch.stack([known[one][1].sum() for one in group]).sum().exp())
        advantages, weights = (
            row.advantage(enumerated_episodes(group, old, rewards, mask)),
            row.weighting(mask, strategies.one_each(mask)),
        )
        for number, one in enumerate(group):
            length = len(one)
            parts["policy"].append(known[one][0])
            parts["old"].append(known[one][1])
            parts["advantages"].append(advantages[number, :length].double())
            parts["weights"].append(chance * weights[number, :length].double())
            parts["index"].append(torch.full((length,), sequence))
            sequence += 1
    flat = {name: torch.cat(tensors) for name, tensors in parts.items()}
    inputs = loss_inputs(
        policy_logprobs=flat["policy"],
        old_logprobs=flat["old"],
        sampler_logprobs=flat["old"],
        advantages=flat["advantages"],
        weights=flat["weights"],
        sequence_index=flat["index"],
    )
    return torch.autograd.grad(policy_loss(inputs, row, ALONE).loss, policy.logits)[0]


def enumerated_episodes(
    group: tuple[Tokens, ...], old: TablePolicy, rewards: Mapping[Tokens, float], mask: torch.Tensor
) -> AdvantageInputs:
    """The group as advantages see it, with the exact critic of the policy that sampled."""
    token_rewards, values = torch.zeros(mask.shape, dtype=torch.float64), torch.zeros(mask.shape, dtype=torch.float64)
    for row, one in enumerate(group):
        token_rewards[row, len(one) - 1] = rewards[one]
        values[row, : len(one)] = torch.tensor([old.value(one[:t], rewards) for t in range(len(one))])
    totals = [rewards[one] for one in group]
    return strategies.episodes(totals, group=[0] * len(group), mask=mask, token_rewards=token_rewards, values=values)


def truth(policy: TablePolicy, rewards: Mapping[Tokens, float]) -> torch.Tensor:
    return torch.autograd.grad(-policy.expected_reward(rewards), policy.logits)[0]


def graded_rewards(policy: TablePolicy) -> dict[Tokens, float]:
    """A reward of its own for each completion; longer ones earn more on average."""
    draws = torch.rand(len(policy.completions()), generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return {one: float(draw) + 0.3 * len(one) for one, draw in zip(policy.completions(), draws, strict=True)}


def binary_rewards(policy: TablePolicy) -> dict[Tokens, float]:
    return {one: float(sum(one) % 3 == 1) for one in policy.completions()}


@pytest.mark.parametrize(("longest", "size"), [(3, 2), (2, 3)])
def test_rloo_is_unbiased_on_first_and_second_step(longest: int, size: int) -> None:
    old = TablePolicy(longest=longest)
    rewards = graded_rewards(old)
    for policy in (old, old.moved(0.01)):  # every ratio of a completion is well within 0.8 to 1.2
        ours = expected_gradient(ALGORITHMS["rloo"], policy, old, rewards, size=size)
        torch.testing.assert_close(ours, truth(policy, rewards), rtol=1e-6, atol=1e-9)


def test_dr_grpo_is_unbiased_up_to_factor() -> None:
    # (R - mean) = (G - 1) / G (R - mean of the others); divided by the constant length.
    policy, row = TablePolicy(longest=2), with_constants(ALGORITHMS["dr_grpo"], {"constant_length": 10})
    rewards = graded_rewards(policy)
    ours = expected_gradient(row, policy, policy, rewards, size=3)
    torch.testing.assert_close(ours, truth(policy, rewards) * (2 / 3) / 10, rtol=1e-6, atol=1e-9)


FIXED = TablePolicy(longest=2, ends=False, seed=3)


def test_maxrl_follows_truncated_likelihood_of_success() -> None:
    # With p the chance of being right and q = 1 - p: (1 - q^(G-1)) / p times the gradient of p, over T tokens each.
    rewards = binary_rewards(FIXED)
    right = float(FIXED.expected_reward(rewards).detach())
    expected = truth(FIXED, rewards) * (1.0 - (1.0 - right) ** 2) / right / 2
    ours = expected_gradient(ALGORITHMS["maxrl"], FIXED, FIXED, rewards, size=3)
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("lam", [0.0, 0.5, 0.95, 1.0])
def test_gae_with_exact_critic_is_unbiased(lam: float) -> None:
    rewards = graded_rewards(FIXED)
    ours = expected_gradient(with_constants(ALGORITHMS["ppo"], {"lam": lam}), FIXED, FIXED, rewards, size=1)
    torch.testing.assert_close(ours, truth(FIXED, rewards) / FIXED.longest, rtol=1e-6, atol=1e-9)


def distilled(policy: TablePolicy, teacher: TablePolicy) -> torch.Tensor:
    """The expected gradient of the row ``distil``, each token paid by ``ln π_teacher - ln π``, over all completions."""
    row, total = ALGORITHMS["distil"], torch.zeros((), dtype=torch.float64)
    for one in policy.completions():
        logprobs = policy.logprobs(one)
        old, mask = logprobs.detach(), torch.ones(1, len(one), dtype=torch.bool)
        gaps = (teacher.logprobs(one).detach() - old)[None]
        values = torch.zeros(mask.shape, dtype=torch.float64)
        paid = strategies.episodes([float(gaps.sum())], mask=mask, token_rewards=gaps, values=values)
        weights = old.sum().exp() * row.weighting(mask, strategies.one_each(mask))[0].double()
        inputs = loss_inputs(policy_logprobs=logprobs, advantages=row.advantage(paid)[0], weights=weights)
        total = total + policy_loss(inputs, row, ALONE).loss
    return torch.autograd.grad(total, policy.logits)[0]


def reverse_kl(policy: TablePolicy, teacher: TablePolicy) -> torch.Tensor:
    """``KL(π || π_teacher)`` of the next token, summed over prefixes, each as often as the policy comes to it."""
    own, other = policy.logits.log_softmax(1), teacher.logits.detach().log_softmax(1)
    kl = (own.exp() * (own - other)).sum(1)
    visits = torch.stack([policy.logprobs(prefix).detach().sum().exp() for prefix in policy.prefixes])
    return (visits * kl).sum()


@pytest.mark.parametrize("longest", [1, 2, 3])
def test_distillation_follows_reverse_kl_per_token(longest: int) -> None:
    # A token's KL is 0 in expectation of what follows it: d/dθ E[ln π - ln π_T] = E[(ln π - ln π_T) d ln π].
    policy, teacher = (TablePolicy(longest=longest, ends=False, seed=seed) for seed in (3, 4))
    expected = torch.autograd.grad(reverse_kl(policy, teacher), policy.logits)[0] / longest
    torch.testing.assert_close(distilled(policy, teacher), expected, rtol=1e-6, atol=1e-9)


OFF = Coefficients(kl=0.0, kl_estimator="k3_ratio", entropy=0.0, mismatch=RolloutCorrectionConfig(mode="off"))
close = partial(torch.testing.assert_close, rtol=1e-9, atol=1e-12)
law = settings(max_examples=min(60, settings.default.max_examples), deadline=None)


@dataclasses.dataclass(frozen=True)
class Ragged:
    """Completions of different lengths; every per-token field is [S, T], padded with NaN."""

    own: torch.Tensor
    tokens: torch.Tensor
    rewards: list[float]
    group: list[int]
    fields: dict[str, torch.Tensor]

    def flat(self, name: str) -> torch.Tensor:
        return self.fields[name][self.tokens]


@st.composite
def ragged(draw: st.DrawFn) -> Ragged:
    """Up to three groups of up to four completions of up to seven tokens, some of them tool output."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    group = [number for number, size in enumerate(sizes) for _ in range(size)]
    masks = []
    for _ in group:
        mask = draw(st.lists(st.booleans(), min_size=1, max_size=7))
        mask[draw(st.integers(0, len(mask) - 1))] = True
        masks.append(mask)
    reward = st.sampled_from([0.0, 1.0, 0.5]) | st.floats(-2.0, 2.0)
    rewards = [draw(reward) for _ in group]
    width = max(map(len, masks))
    tokens = torch.tensor([[t < len(mask) for t in range(width)] for mask in masks])
    own = torch.tensor([mask + [False] * (width - len(mask)) for mask in masks])
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    names = ("logprob", "value", "old_logprob", "sampler_logprob", "ref_logprob", "old_value")
    fields = {
        name: (torch.randn(own.shape, generator=generator, dtype=torch.float64) * 0.4 - 1.0).masked_fill(
            ~tokens, float("nan")
        )
        for name in names
    }
    for name in ("logprob", "value"):
        fields[name].requires_grad_()
    return Ragged(own=own, tokens=tokens, rewards=rewards, group=group, fields=fields)


def completions(batch: Ragged) -> list[iteration.Completion]:
    """The batch as the reference has it: scalars that carry a gradient, and Python floats."""

    def token(row: int, t: int) -> iteration.TokenOf:
        numbers = {name: field[row, t] for name, field in batch.fields.items()}
        plain = {name: float(number) for name, number in numbers.items() if name not in ("logprob", "value")}
        return iteration.TokenOf(
            logprob=numbers["logprob"], value=numbers["value"], own=bool(batch.own[row, t]), **plain
        )

    return [
        iteration.Completion([token(row, t) for t in range(int(batch.tokens[row].sum()))], reward, number)
        for row, (reward, number) in enumerate(zip(batch.rewards, batch.group, strict=True))
    ]


def episodes_of(batch: Ragged, *, beta: float) -> advantages.AdvantageInputs:
    """The batch as the fast code has it, with the KL in the reward."""
    gap = batch.fields["old_logprob"] - batch.fields["ref_logprob"]
    penalties = (-beta * gap).masked_fill(~batch.own, 0.0)
    for row, reward in enumerate(batch.rewards):
        penalties[row, int(batch.own[row].nonzero()[-1])] += reward
    return strategies.episodes(
        batch.rewards, group=batch.group, mask=batch.own, token_rewards=penalties, values=batch.fields["old_value"]
    )


def flat_inputs(batch: Ragged, advantage: torch.Tensor, weights: torch.Tensor) -> LossInputs:
    """Flat tensors of one micro-batch that holds everything."""
    return loss_inputs(
        policy_logprobs=batch.flat("logprob"),
        old_logprobs=batch.flat("old_logprob"),
        sampler_logprobs=batch.flat("sampler_logprob"),
        ref_logprobs=batch.flat("ref_logprob"),
        advantages=advantage[batch.tokens],
        weights=weights[batch.tokens],
        loss_mask=batch.own[batch.tokens],
        sequence_index=torch.arange(len(batch.group)).repeat_interleave(batch.tokens.sum(1)),
    )


def same(batch: Ragged, field: str, ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Loss and gradient agree to 1e-9, and padding and tool output have no gradient."""
    close(ours, theirs)
    (mine,) = torch.autograd.grad(ours, batch.fields[field], retain_graph=True)
    connected = theirs + 0.0 * batch.fields[field][batch.own].sum()  # where every token is clipped, it is a constant
    (reference,) = torch.autograd.grad(connected, batch.fields[field])
    close(mine, reference)
    assert not bool(mine[~batch.own].any())


@law
@given(batch=ragged(), beta=st.sampled_from([0.0, 0.3]), gamma=st.floats(0.8, 1.0), lam=st.floats(0.0, 1.0))
def test_ppo_equals_plain_loops(batch: Ragged, beta: float, gamma: float, lam: float) -> None:
    expected = iteration.ppo(completions(batch), beta=beta, gamma=gamma, lam=lam, clip=0.2, value_clip=0.3)
    with strategies.double_precision():
        row = ALGORITHMS["ppo"]
        raw = advantages.gae(episodes_of(batch, beta=beta), gamma=gamma, lam=lam)
        weights = row.weighting(batch.own, strategies.one_each(batch.own))
        inputs = flat_inputs(batch, advantages.whiten(raw, batch.own), weights)
        policy = policy_loss(inputs, row, OFF).loss
        values, old_values = batch.fields["value"][batch.own], batch.fields["old_value"][batch.own]
        losses = value_loss(values, old_values, raw[batch.own] + old_values, clip_range=0.3)
        critic = (weights[batch.own] * losses).sum()
    same(batch, "logprob", policy, expected[0])
    same(batch, "value", critic, expected[1])


@law
@given(batch=ragged(), beta=st.sampled_from([0.0, 0.04]))
def test_grpo_equals_plain_loops(batch: Ragged, beta: float) -> None:
    expected = iteration.grpo(completions(batch), beta=beta, clip=0.2, cap=2.0, epsilon=advantages.STD_EPSILON)
    coefficients: Any = dataclasses.replace(OFF, kl=beta, mismatch=RolloutCorrectionConfig())
    with strategies.double_precision():
        row = ALGORITHMS["grpo"]
        inputs = flat_inputs(
            batch, row.advantage(episodes_of(batch, beta=0.0)), row.weighting(batch.own, strategies.one_each(batch.own))
        )
        ours = policy_loss(inputs, row, coefficients).loss
    same(batch, "logprob", ours, expected)

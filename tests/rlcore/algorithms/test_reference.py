"""The fast code against plain loops over Python floats, to 1e-9, on ragged batches with tool output."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.algorithms import advantages
from rlcore.algorithms.objective import Coefficients, LossInputs, policy_loss
from rlcore.algorithms.table import ALGORITHMS
from rlcore.algorithms.values import value_loss
from rlcore.config import RolloutCorrectionConfig
from tests import strategies
from tests.reference import iteration
from tests.reference.advantages import gae as plain_gae

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
        """The tokens of a field without padding, [N]."""
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


def episodes(batch: Ragged, *, beta: float) -> advantages.AdvantageInputs:
    """The batch as the fast code has it, with the KL in the reward."""
    gap = batch.fields["old_logprob"] - batch.fields["ref_logprob"]
    penalties = (-beta * gap).masked_fill(~batch.own, 0.0)
    for row, reward in enumerate(batch.rewards):
        penalties[row, int(batch.own[row].nonzero()[-1])] += reward
    return strategies.episodes(
        batch.rewards, group=batch.group, mask=batch.own, token_rewards=penalties, values=batch.fields["old_value"]
    )


def loss_inputs(batch: Ragged, advantage: torch.Tensor, weights: torch.Tensor) -> LossInputs:
    """Flat tensors of one micro-batch that holds everything."""
    zeros = torch.zeros(int(batch.tokens.sum()))
    return LossInputs(
        policy_logprobs=batch.flat("logprob"),
        entropy=zeros,
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
def test_ppo_from_rewards_to_both_losses_equals_the_plain_loops(
    batch: Ragged, beta: float, gamma: float, lam: float
) -> None:
    expected = iteration.ppo(completions(batch), beta=beta, gamma=gamma, lam=lam, clip=0.2, value_clip=0.3)
    with strategies.double_precision():
        row = ALGORITHMS["ppo"]
        raw = advantages.gae(episodes(batch, beta=beta), gamma=gamma, lam=lam)
        weights = row.weighting(batch.own, strategies.one_each(batch.own))
        inputs = loss_inputs(batch, advantages.whiten(raw, batch.own), weights)
        policy = policy_loss(inputs, row, OFF).loss
        values, old_values = batch.fields["value"][batch.own], batch.fields["old_value"][batch.own]
        losses = value_loss(values, old_values, raw[batch.own] + old_values, clip_range=0.3)
        critic = (weights[batch.own] * losses).sum()
    same(batch, "logprob", policy, expected[0])
    same(batch, "value", critic, expected[1])


@law
@given(batch=ragged(), beta=st.sampled_from([0.0, 0.04]))
def test_grpo_from_rewards_to_loss_equals_the_plain_loops(batch: Ragged, beta: float) -> None:
    expected = iteration.grpo(completions(batch), beta=beta, clip=0.2, cap=2.0, epsilon=advantages.STD_EPSILON)
    coefficients: Any = dataclasses.replace(OFF, kl=beta, mismatch=RolloutCorrectionConfig())
    with strategies.double_precision():
        row = ALGORITHMS["grpo"]
        inputs = loss_inputs(
            batch, row.advantage(episodes(batch, beta=0.0)), row.weighting(batch.own, strategies.one_each(batch.own))
        )
        ours = policy_loss(inputs, row, coefficients).loss
    same(batch, "logprob", ours, expected)


@law
@given(batch=ragged(), gamma=st.floats(0.5, 1.0), lam=st.floats(0.0, 1.0))
def test_gae_across_tool_output_equals_the_definition_on_the_compressed_sequence(
    batch: Ragged, gamma: float, lam: float
) -> None:
    with strategies.double_precision():
        laid_out = episodes(batch, beta=0.1)
        ours = advantages.gae(laid_out, gamma=gamma, lam=lam)
    for row in range(len(batch.group)):
        columns = (laid_out.token_rewards[row], laid_out.values[row], laid_out.mask[row])
        rewards, values, own = (column.tolist() for column in columns)
        expected = plain_gae(rewards, values, own, gamma=gamma, lam=lam)
        assert ours[row].tolist() == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_the_reference_itself_has_the_gradient_of_finite_differences() -> None:
    batch = fixed_batch()
    (gradient,) = torch.autograd.grad(
        iteration.grpo(completions(batch), beta=0.04, clip=0.2, cap=2.0, epsilon=1e-6), batch.fields["logprob"]
    )
    for row, t in batch.own.nonzero().tolist():
        losses = []
        for step in (1e-6, -1e-6):
            moved = batch.fields["logprob"].detach().clone()
            moved[row, t] += step
            fields = batch.fields | {"logprob": moved}
            loss = iteration.grpo(
                completions(dataclasses.replace(batch, fields=fields)), beta=0.04, clip=0.2, cap=2.0, epsilon=1e-6
            )
            losses.append(float(loss))
        assert (losses[0] - losses[1]) / 2e-6 == pytest.approx(float(gradient[row, t]), rel=1e-6, abs=1e-8)


def fixed_batch() -> Ragged:
    """Two completions of one group, three and two tokens."""
    own = torch.tensor([[True, False, True], [True, True, False]])
    tokens = torch.tensor([[True, True, True], [True, True, False]])
    generator = torch.Generator().manual_seed(0)
    names = ("logprob", "value", "old_logprob", "sampler_logprob", "ref_logprob", "old_value")
    fields = {name: torch.randn(2, 3, generator=generator, dtype=torch.float64) * 0.2 - 1.0 for name in names}
    fields["logprob"].requires_grad_()
    return Ragged(own=own, tokens=tokens, rewards=[1.0, 0.0], group=[0, 0], fields=fields)

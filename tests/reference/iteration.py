"""One iteration of PPO and of GRPO from rewards to losses: loops over Python floats, straight from the formulas.

What carries a gradient (log-probability and value of a token) is a float64 scalar, so autograd goes through the loops.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from tests.reference import advantages, losses


class TokenOf(NamedTuple):
    """One token of a completion. ``logprob`` and ``value`` are scalars with a gradient; ``own``: not tool output."""

    logprob: torch.Tensor
    value: torch.Tensor
    old_logprob: float
    sampler_logprob: float
    ref_logprob: float
    old_value: float
    own: bool


class Completion(NamedTuple):
    """A completion with its score."""

    tokens: list[TokenOf]
    reward: float
    group: int


def token_rewards(completion: Completion, *, beta: float) -> list[float]:
    """``-beta * (old - ref)`` on the policy's own tokens, and the score on the last of them."""
    rewards = [-beta * (t.old_logprob - t.ref_logprob) if t.own else 0.0 for t in completion.tokens]
    last = max(place for place, t in enumerate(completion.tokens) if t.own)
    rewards[last] += completion.reward
    return rewards


def ppo(
    batch: Sequence[Completion], *, beta: float, gamma: float, lam: float, clip: float, value_clip: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The policy's and the critic's loss: KL in the reward, GAE, whitened advantages, both clips, token means."""
    raw: list[float] = []
    own: list[TokenOf] = []
    for completion in batch:
        rewards = token_rewards(completion, beta=beta)
        values = [t.old_value for t in completion.tokens]
        mask = [t.own for t in completion.tokens]
        of_tokens = advantages.gae(rewards, values, mask, gamma=gamma, lam=lam)
        for place, token in enumerate(completion.tokens):
            if token.own:
                raw.append(of_tokens[place])
                own.append(token)
    centre, spread = advantages.mean(raw), advantages.population_std(raw)
    policy = value = torch.zeros((), dtype=torch.float64)
    for token, advantage in zip(own, raw, strict=True):
        whitened = (advantage - centre) / spread if max(raw) - min(raw) > 1e-8 else 0.0
        policy = policy - losses.clipped_objective(as_token(token, whitened), 1.0 - clip, 1.0 + clip)
        value = value + clipped_value_loss(token, advantage + token.old_value, clip=value_clip)
    return policy / len(own), value / len(own)


def as_token(token: TokenOf, advantage: float) -> losses.Token:
    """The token as the losses have it."""
    old, ref = (torch.tensor(number, dtype=torch.float64) for number in (token.old_logprob, token.ref_logprob))
    return losses.Token(token.logprob, old, ref, advantage)


def clipped_value_loss(token: TokenOf, target: float, *, clip: float) -> torch.Tensor:
    """``0.5 max((V - R)^2, (V_clipped - R)^2)`` with a gradient."""
    plain = 0.5 * (token.value - target) ** 2
    low, high = token.old_value - clip, token.old_value + clip
    if low <= token.value <= high:
        return plain
    clipped = 0.5 * ((low if token.value < low else high) - target) ** 2
    return plain if float(plain.detach()) >= clipped else clipped + 0.0 * token.value  # a constant: no gradient


def grpo(batch: Sequence[Completion], *, beta: float, clip: float, cap: float, epsilon: float) -> torch.Tensor:
    """The loss: group-normalised rewards, KL in the loss, truncated mismatch weights, mean of sequence means."""
    total = torch.zeros((), dtype=torch.float64)
    for completion in batch:
        rewards = [other.reward for other in batch if other.group == completion.group]
        advantage = 0.0
        if max(rewards) - min(rewards) > 1e-8:
            spread = advantages.population_std(rewards) + epsilon
            advantage = (completion.reward - advantages.mean(rewards)) / spread
        own = [t for t in completion.tokens if t.own]
        of_sequence = torch.zeros((), dtype=torch.float64)
        for token in own:
            gap = token.ref_logprob - token.logprob
            kl = torch.exp(token.logprob - token.old_logprob) * (torch.exp(gap) - gap - 1.0)
            objective = losses.clipped_objective(as_token(token, advantage), 1.0 - clip, 1.0 + clip)
            weight = min(math.exp(token.old_logprob - token.sampler_logprob), cap)
            of_sequence = of_sequence + weight * (objective - beta * kl)
        total = total - of_sequence / len(own)
    return total / len(batch)

"""Advantages: how much better a token or a completion was than expected.

Completions stand in padded rows, [S, T]; ``mask`` is True on the tokens that the policy produced (False on padding and
on tool output). Rewards are float64, so that equal rewards stay equal; a reward that is NaN was not scored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Float64, Int

EQUAL_REWARDS = 1e-8  # rewards of a group that differ by no more than this carry no signal
STD_EPSILON = 1e-6


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AdvantageInputs:
    """What an advantage is computed from, for S completions of up to T tokens.

    ``rewards``: float64 [S], the score plus every per-token penalty; NaN where the grader failed.
    ``group``: int64 [S], completions of one prompt share a number.
    ``token_rewards``: float64 [S, T], the penalties per token, with the score on the last token.
    ``values``: float32 [S, T], zeros without a critic. ``mask``: bool [S, T].
    ``next_values``: float32 [S], the value beyond the end; 0 where the episode ended by itself.
    """

    rewards: Float64[Tensor, "completions"]
    group: Int[Tensor, "completions"]
    token_rewards: Float64[Tensor, "completions time"]
    values: Float[Tensor, "completions time"]
    mask: Bool[Tensor, "completions time"]
    next_values: Float[Tensor, "completions"]


#: Episodes -> advantages [S, T] in the dtype of the values (float32), 0 where masked
AdvantageFn = Callable[[AdvantageInputs], Tensor]


def gae(
    episodes: AdvantageInputs, *, gamma: float, lam: float | Float64[Tensor, "completions"]
) -> Float[Tensor, "completions time"]:
    """Generalised advantage estimation (Schulman et al. 2016, eq. 16): [S, T].

    ``delta[t] = r[t] + gamma * V[t+1] - V[t]``, ``A[t] = delta[t] + gamma * lam * A[t+1]``, with V beyond the end from
    ``next_values``. ``lam``: one for all, or float64 [S], one per completion.
    Masked tokens (tool output) are stepped over: next value and running sum are carried across them without decay,
    which equals the computation on the compressed sequence of the policy's own tokens.
    """
    mask, rewards, values = episodes.mask, episodes.token_rewards, episodes.values.double()
    advantages = torch.zeros_like(rewards)
    running = torch.zeros_like(rewards[:, 0])
    next_value = episodes.next_values.double()
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        running = torch.where(mask[:, t], delta + gamma * lam * running, running)
        next_value = torch.where(mask[:, t], values[:, t], next_value)
        advantages[:, t] = running
    return advantages.masked_fill(~mask, 0.0).to(episodes.values.dtype)


def length_adaptive_gae(episodes: AdvantageInputs, *, gamma: float, alpha: float) -> Float[Tensor, "completions time"]:
    """GAE with ``lam = 1 - 1 / (alpha * length)`` per completion, at least 0 (VAPO, Yue et al. 2025)."""
    lengths = episodes.mask.sum(1).clamp(min=1).double()
    return gae(episodes, gamma=gamma, lam=(1.0 - 1.0 / (alpha * lengths)).clamp(min=0.0))


def policy_gae(
    episodes: AdvantageInputs, *, gamma: float, lam: float, lam_alpha: float = 0.0
) -> Float[Tensor, "completions time"]:
    """The policy's advantages with a critic: :func:`length_adaptive_gae` where ``lam_alpha`` > 0, else :func:`gae`."""
    if lam_alpha > 0.0:
        return length_adaptive_gae(episodes, gamma=gamma, alpha=lam_alpha)
    return gae(episodes, gamma=gamma, lam=lam)


def value_gae(
    episodes: AdvantageInputs, *, gamma: float, lam: float, lam_value: float | None = None
) -> Float[Tensor, "completions time"]:
    """What the critic's returns are made from: :func:`gae` with a lambda of its own, if it has one (VAPO)."""
    return gae(episodes, gamma=gamma, lam=lam if lam_value is None else lam_value)


def whiten(
    advantages: Float[Tensor, "completions time"], mask: Bool[Tensor, "completions time"]
) -> Float[Tensor, "completions time"]:
    """Mean 0 and variance 1 over the unmasked tokens of [S, T], in their dtype; exactly 0 where they are all equal."""
    kept = advantages[mask].double()
    if not len(kept) or not float(kept.max() - kept.min()) > EQUAL_REWARDS:
        return torch.zeros_like(advantages)
    mean = kept.mean()
    whitened = (advantages.double() - mean) / math.sqrt(float((kept - mean).square().sum()) / len(kept))
    return whitened.masked_fill(~mask, 0.0).to(advantages.dtype)


def per_token_reward(episodes: AdvantageInputs) -> Float[Tensor, "completions time"]:
    """Each token's own reward, without what comes after it: GAE at ``gamma = 0`` and no critic, [S, T].

    With the KL to a teacher as the reward per token it is on-policy distillation (Agarwal et al. 2024, reverse KL; Lu
    2025): ``A = ln π_teacher - ln π`` of the token that was sampled.
    """
    return episodes.token_rewards.masked_fill(~episodes.mask, 0.0).to(episodes.values.dtype)


#: What a group's centred rewards are divided by: (its rewards, all rewards of the batch) -> scalar.
SCALES: Mapping[str, Callable[[Tensor, Tensor], Tensor | float]] = {
    "group": lambda group, batch: group.std(unbiased=False) + STD_EPSILON,
    "group_sample": lambda group, batch: group.std(unbiased=True) + STD_EPSILON,
    "batch": lambda group, batch: batch.std(unbiased=False) + STD_EPSILON,
    "batch_sample": lambda group, batch: batch.std(unbiased=True) + STD_EPSILON,
    "none": lambda group, batch: 1.0,
}


def group_relative(episodes: AdvantageInputs, *, scale: str) -> Float[Tensor, "completions time"]:
    """``(R - mean of the group) / scale``, the scale being one of :data:`SCALES`: a population std unless said so."""
    batch = episodes.rewards[episodes.rewards.isfinite()]
    return _by_group(episodes, lambda rewards: (rewards - rewards.mean()) / SCALES[scale](rewards, batch))


#: ``(R - mean) / std`` within the group, population std (GRPO, Shao et al. 2024, section 4.1.2).
group_normalized = partial(group_relative, scale="group")

#: ``R - mean`` within the group: no division by the std (Dr. GRPO, Liu et al. 2025).
group_centered = partial(group_relative, scale="none")


def group_over_mean(episodes: AdvantageInputs) -> Float[Tensor, "completions time"]:
    """``(R - mean) / mean`` within the group (MaxRL, Tajwar et al. 2026): hard prompts count more.

    0 for a group whose mean is 0 or below: the estimator is of the likelihood of success, and there was none. Rewards
    are meant to be 0 or positive; then ``-1 <= A <= G - 1``. The divisor is at least ``(max - min) / G``, which no
    such group falls below, so that penalties that nearly cancel the mean cannot blow the advantage up: ``|A| <= G``.
    """

    def normalise(rewards: Tensor) -> Tensor:
        mean, smallest = rewards.mean(), (rewards.max() - rewards.min()) / len(rewards)
        if float(mean) <= EQUAL_REWARDS:
            return torch.zeros_like(rewards)
        return (rewards - mean) / torch.maximum(mean, smallest)

    return _by_group(episodes, normalise)


def leave_one_out(episodes: AdvantageInputs) -> Float[Tensor, "completions time"]:
    """``R_i - mean of the others`` within the group (RLOO, Kool et al. 2019; Ahmadian et al. 2024)."""
    return _by_group(episodes, lambda rewards: (rewards - rewards.mean()) * (len(rewards) / (len(rewards) - 1)))


def batch_normalized(episodes: AdvantageInputs) -> Float[Tensor, "completions time"]:
    """``(R - mean) / std`` over the whole batch (REINFORCE++, Hu 2025)."""
    rewards, scored = episodes.rewards, episodes.rewards.isfinite()
    advantages = torch.zeros_like(rewards)
    kept = rewards[scored]
    if has_signal(kept):
        advantages[scored] = (kept - kept.mean()) / (kept.std(unbiased=False) + STD_EPSILON)
    return _per_token(advantages, episodes)


def has_signal(rewards: Float[Tensor, "completions"]) -> bool:
    """Whether rewards differ at all: decided by max - min, never by a std plus a tiny epsilon."""
    return len(rewards) > 1 and float(rewards.max() - rewards.min()) > EQUAL_REWARDS


def _by_group(episodes: AdvantageInputs, normalise: Callable[[Tensor], Tensor]) -> Tensor:
    advantages = torch.zeros_like(episodes.rewards)
    for number in set(episodes.group.tolist()):
        members = (episodes.group == number) & episodes.rewards.isfinite()
        if has_signal(episodes.rewards[members]):
            advantages[members] = normalise(episodes.rewards[members])
    return _per_token(advantages, episodes)


def _per_token(advantages: Tensor, episodes: AdvantageInputs) -> Tensor:
    spread = advantages[:, None].expand(episodes.mask.shape).masked_fill(~episodes.mask, 0.0)
    return spread.to(episodes.values.dtype)

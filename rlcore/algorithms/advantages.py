"""Advantages: how much better a token or completion was than expected.

Completions are padded rows, [S, T]. The samples of an episode with branches are one row, one after the other.
``mask`` is True on the policy's tokens and False on padding and tool output. Rewards are float64, so that equal rewards
stay equal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Float64, Int

EQUAL_REWARDS = 1e-8  # a group whose rewards differ by at most this has no signal
STD_EPSILON = 1e-6


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AdvantageInputs:
    """Inputs of an advantage function, for S completions of up to T tokens.

    Attributes:
        rewards: float64 [S], score plus all per-token penalties; NaN if the grader failed.
        group: int64 [S], equal for completions of one prompt.
        token_rewards: float64 [S, T], per-token penalties, with the score on the last token.
        values: float32 [S, T], zeros without a critic.
        mask: bool [S, T].
        next_values: float32 [S], value after the last token; 0 if the episode ended by itself.
    """

    rewards: Float64[Tensor, "completions"]
    group: Int[Tensor, "completions"]
    token_rewards: Float64[Tensor, "completions time"]
    values: Float[Tensor, "completions time"]
    mask: Bool[Tensor, "completions time"]
    next_values: Float[Tensor, "completions"]


def lay_out_episodes(
    rewards: Sequence[Float64[Tensor, "_time"]],
    group: Sequence[int],
    penalties: Sequence[Float64[Tensor, "_time"]],
    values: Sequence[Float[Tensor, "_time"]],
    masks: Sequence[Bool[Tensor, "_time"]],
    next_values: Float[Tensor, "completions"],
) -> AdvantageInputs:
    """Pad episodes to rows; ``rewards`` and ``penalties`` are float64 [T] per episode, over all its samples."""
    pairs = list(zip(rewards, penalties, strict=True))
    totals = [float(reward.sum()) + float(penalty.sum()) for reward, penalty in pairs]
    return AdvantageInputs(
        rewards=torch.tensor(totals, dtype=torch.float64),
        group=torch.tensor(group),
        token_rewards=pad_sequence([penalty + reward for reward, penalty in pairs], batch_first=True),
        values=pad_sequence(list(values), batch_first=True).to(torch.get_default_dtype()),
        mask=pad_sequence(list(masks), batch_first=True),
        next_values=next_values,
    )


#: AdvantageInputs -> advantages [S, T] in the dtype of the values (float32), 0 where masked
AdvantageFn = Callable[[AdvantageInputs], Tensor]


def gae(
    episodes: AdvantageInputs, *, gamma: float, lam: float | Float64[Tensor, "completions"]
) -> Float[Tensor, "completions time"]:
    """Return generalized advantage estimates, [S, T] (Schulman et al. 2016, eq. 16).

    ``delta[t] = r[t] + gamma * V[t+1] - V[t]`` and ``A[t] = delta[t] + gamma * lam * A[t+1]``. ``lam`` is a scalar, or
    float64 [S]. Masked tokens (tool output) are skipped without decay.
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
    """Return GAE with ``lam = 1 - 1 / (alpha * length)`` per completion, at least 0 (VAPO, Yue et al. 2025)."""
    lengths = episodes.mask.sum(1).clamp(min=1).double()
    return gae(episodes, gamma=gamma, lam=(1.0 - 1.0 / (alpha * lengths)).clamp(min=0.0))


def policy_gae(
    episodes: AdvantageInputs, *, gamma: float, lam: float, lam_alpha: float = 0.0
) -> Float[Tensor, "completions time"]:
    """Return the policy's advantages: :func:`length_adaptive_gae` if ``lam_alpha`` > 0, else :func:`gae`."""
    if lam_alpha > 0.0:
        return length_adaptive_gae(episodes, gamma=gamma, alpha=lam_alpha)
    return gae(episodes, gamma=gamma, lam=lam)


def value_gae(
    episodes: AdvantageInputs, *, gamma: float, lam: float, lam_value: float | None = None
) -> Float[Tensor, "completions time"]:
    """Return the advantages that define the critic's returns: :func:`gae` with ``lam_value`` if set (VAPO)."""
    return gae(episodes, gamma=gamma, lam=lam if lam_value is None else lam_value)


def whiten(
    advantages: Float[Tensor, "completions time"], mask: Bool[Tensor, "completions time"]
) -> Float[Tensor, "completions time"]:
    """Normalize the unmasked tokens of [S, T] to mean 0 and variance 1, in their dtype; 0 if all are equal."""
    kept = advantages[mask].double()
    if not len(kept) or not float(kept.max() - kept.min()) > EQUAL_REWARDS:
        return torch.zeros_like(advantages)
    mean = kept.mean()
    whitened = (advantages.double() - mean) / math.sqrt(float((kept - mean).square().sum()) / len(kept))
    return whitened.masked_fill(~mask, 0.0).to(advantages.dtype)


def per_token_reward(episodes: AdvantageInputs) -> Float[Tensor, "completions time"]:
    """Return each token's own reward, [S, T], ignoring later tokens: GAE at ``gamma = 0`` without a critic.

    With the KL to a teacher as per-token reward, this is on-policy distillation (Agarwal et al. 2024, reverse KL; Lu
    2025): ``A = ln π_teacher - ln π`` of the sampled token.
    """
    return episodes.token_rewards.masked_fill(~episodes.mask, 0.0).to(episodes.values.dtype)


#: Divisor of a group's centered rewards: (its rewards, all rewards of the batch) -> scalar.
SCALES: Mapping[str, Callable[[Tensor, Tensor], Tensor | float]] = {
    "group": lambda group, batch: group.std(unbiased=False) + STD_EPSILON,
    "group_sample": lambda group, batch: group.std(unbiased=True) + STD_EPSILON,
    "batch": lambda group, batch: batch.std(unbiased=False) + STD_EPSILON,
    "batch_sample": lambda group, batch: batch.std(unbiased=True) + STD_EPSILON,
    "none": lambda group, batch: 1.0,
}


def group_relative(episodes: AdvantageInputs, *, scale: str) -> Float[Tensor, "completions time"]:
    """Return ``(R - mean of the group) / scale``, with ``scale`` a key of :data:`SCALES`."""
    batch = episodes.rewards[episodes.rewards.isfinite()]
    return _by_group(episodes, lambda rewards: (rewards - rewards.mean()) / SCALES[scale](rewards, batch))


#: ``(R - mean) / std`` within the group, with the population std (GRPO, Shao et al. 2024, section 4.1.2).
group_normalized = partial(group_relative, scale="group")

#: ``R - mean`` within the group, without division by the std (Dr. GRPO, Liu et al. 2025).
group_centered = partial(group_relative, scale="none")


def group_over_mean(episodes: AdvantageInputs) -> Float[Tensor, "completions time"]:
    """Return ``(R - mean) / mean`` within the group (MaxRL, Tajwar et al. 2026); hard prompts count more.

    Returns 0 for a group whose mean is at most 0, because the likelihood of success cannot be estimated there. Rewards
    should be nonnegative; then ``-1 <= A <= G - 1``. The divisor is at least ``(max - min) / G``, so that penalties
    that nearly cancel the mean still give ``|A| <= G``.
    """

    def normalize(rewards: Tensor) -> Tensor:
        mean, smallest = rewards.mean(), (rewards.max() - rewards.min()) / len(rewards)
        if float(mean) <= EQUAL_REWARDS:
            return torch.zeros_like(rewards)
        return (rewards - mean) / torch.maximum(mean, smallest)

    return _by_group(episodes, normalize)


def leave_one_out(episodes: AdvantageInputs) -> Float[Tensor, "completions time"]:
    """Return ``R_i - mean of the others`` within the group (RLOO, Kool et al. 2019; Ahmadian et al. 2024)."""
    return _by_group(episodes, lambda rewards: (rewards - rewards.mean()) * (len(rewards) / (len(rewards) - 1)))


def batch_normalized(episodes: AdvantageInputs) -> Float[Tensor, "completions time"]:
    """Return ``(R - mean) / std`` over the whole batch (REINFORCE++, Hu 2025)."""
    return group_normalized(replace(episodes, group=torch.zeros_like(episodes.group)))


def has_signal(rewards: Float[Tensor, "completions"]) -> bool:
    """Return True if the rewards differ, by max - min and not by a standard deviation plus epsilon."""
    return len(rewards) > 1 and float(rewards.max() - rewards.min()) > EQUAL_REWARDS


def _by_group(episodes: AdvantageInputs, normalize: Callable[[Tensor], Tensor]) -> Tensor:
    advantages = torch.zeros_like(episodes.rewards)
    for number in set(episodes.group.tolist()):
        members = (episodes.group == number) & episodes.rewards.isfinite()
        if has_signal(episodes.rewards[members]):
            advantages[members] = normalize(episodes.rewards[members])
    spread = advantages[:, None].expand(episodes.mask.shape).masked_fill(~episodes.mask, 0.0)
    return spread.to(episodes.values.dtype)

"""Importance ratios and policy losses per token, to be minimized: pure functions.

The ratio is of the trained policy to the policy at the start of the update. A sequence is one sample. An episode with
several samples has a ratio of each: they share no sequence of tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

LOG_RATIO_LIMIT = 20.0

#: (log_ratio [N], sequence_index [N], loss_mask [N]) -> log_ratio [N]
RatioFn = Callable[[Tensor, Tensor, Tensor], Tensor]


def token_ratio(
    log_ratio: Float[Tensor, "tokens"], sequence_index: Int[Tensor, "tokens"], loss_mask: Bool[Tensor, "tokens"]
) -> Float[Tensor, "tokens"]:
    """Return the log-ratio of each token, [N] (PPO, Schulman et al. 2017)."""
    return log_ratio


def sequence_ratio(
    log_ratio: Float[Tensor, "tokens"], sequence_index: Int[Tensor, "tokens"], loss_mask: Bool[Tensor, "tokens"]
) -> Float[Tensor, "tokens"]:
    """Return the mean log-ratio of each token's sequence, [N]: the geometric mean (GSPO, eq. 7).

    Unlike a product of ratios, it has the same scale at any length.
    """
    return sequence_mean(log_ratio, sequence_index, loss_mask)[sequence_index]


def completion_ratio(
    log_ratio: Float[Tensor, "tokens"], sequence_index: Int[Tensor, "tokens"], loss_mask: Bool[Tensor, "tokens"]
) -> Float[Tensor, "tokens"]:
    """Return the summed log-ratio of each token's sequence, [N], within ±20: a completion is one action (RLOO).

    Only this ratio makes an off-policy estimate exact, for an episode of one sample. Its variance grows with length, so
    it should be clipped.
    """
    totals = sequence_sum(log_ratio, sequence_index, loss_mask)
    return totals.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)[sequence_index]


def sequence_mean(
    values: Float[Tensor, "tokens"], sequence_index: Int[Tensor, "tokens"], loss_mask: Bool[Tensor, "tokens"]
) -> Float[Tensor, "sequences"]:
    """Return the mean over the unmasked tokens of each sequence: [N] to [S]; 0 if a sequence has none."""
    counts = sequence_sum(torch.ones_like(values), sequence_index, loss_mask)
    return sequence_sum(values, sequence_index, loss_mask) / counts.clamp(min=1.0)


def sequence_sum(
    values: Float[Tensor, "tokens"], sequence_index: Int[Tensor, "tokens"], loss_mask: Bool[Tensor, "tokens"]
) -> Float[Tensor, "sequences"]:
    """Return the sum over the unmasked tokens of each sequence: [N] to [S]."""
    num_sequences = int(sequence_index.max()) + 1 if len(sequence_index) else 0
    kept = values.masked_fill(~loss_mask, 0.0)
    return values.new_zeros(num_sequences).index_add(0, sequence_index, kept)


def clamped_difference(
    minuend: Float[Tensor, "tokens"], subtrahend: Float[Tensor, "tokens"], loss_mask: Bool[Tensor, "tokens"]
) -> Float[Tensor, "tokens"]:
    """Return ``minuend - subtrahend`` of log-probabilities, 0 where masked, within ±20 so that exp is finite."""
    difference = (minuend - subtrahend).masked_fill(~loss_mask, 0.0)
    return difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


@dataclass(frozen=True, slots=True, eq=False)
class Surrogate:
    """Policy loss per token.

    Attributes:
        loss: float [N].
        clipped_low: bool [N], True if the lower bound cut the gradient.
        clipped_high: bool [N], likewise for the upper bound.
    """

    loss: Float[Tensor, "tokens"]
    clipped_low: Bool[Tensor, "tokens"]
    clipped_high: Bool[Tensor, "tokens"]


#: (log_ratio [N], policy_logprobs [N], advantages [N]) -> Surrogate
SurrogateFn = Callable[[Tensor, Tensor, Tensor], Surrogate]


def ppo_clip(
    log_ratio: Float[Tensor, "tokens"],
    policy_logprobs: Float[Tensor, "tokens"],
    advantages: Float[Tensor, "tokens"],
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float = 0.0,
) -> Surrogate:
    """Return ``-min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)`` (PPO, Schulman et al. 2017, eq. 7).

    With ``dual_clip`` c > 1 (usually 3) the loss of a token with a negative advantage is at most ``-c * A``: beyond
    ratio c it has no gradient (Ye et al. 2020, eq. 5). 0 disables it.
    """
    ratio = log_ratio.exp()
    clipped_ratio = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = -torch.minimum(ratio * advantages, clipped_ratio * advantages)
    clipped_high = (ratio > 1.0 + clip_high) & (advantages > 0)
    if dual_clip > 0.0:
        loss = torch.where(advantages < 0, torch.minimum(loss, -dual_clip * advantages), loss)
        clipped_high = clipped_high | ((ratio > dual_clip) & (advantages < 0))
    return Surrogate(loss, clipped_low=(ratio < 1.0 - clip_low) & (advantages < 0), clipped_high=clipped_high)


def unclipped(
    log_ratio: Float[Tensor, "tokens"], policy_logprobs: Float[Tensor, "tokens"], advantages: Float[Tensor, "tokens"]
) -> Surrogate:
    """Return ``-ratio * A`` (Schulman et al. 2017, eq. 6); only a penalty bounds the ratio."""
    nowhere = torch.zeros_like(advantages, dtype=torch.bool)
    return Surrogate(-log_ratio.exp() * advantages, nowhere, nowhere)


def cispo(
    log_ratio: Float[Tensor, "tokens"],
    policy_logprobs: Float[Tensor, "tokens"],
    advantages: Float[Tensor, "tokens"],
    *,
    clip_low: float,
    clip_high: float,
) -> Surrogate:
    """Return ``-clip(ratio).detach() * A * logprob`` (MiniMax-M1 2025, eq. 4); every token keeps a gradient."""
    ratio = log_ratio.detach().exp()
    loss = -ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages * policy_logprobs
    return Surrogate(loss, clipped_low=ratio < 1.0 - clip_low, clipped_high=ratio > 1.0 + clip_high)


def sapo(
    log_ratio: Float[Tensor, "tokens"],
    policy_logprobs: Float[Tensor, "tokens"],
    advantages: Float[Tensor, "tokens"],
    *,
    gate_positive: float,
    gate_negative: float,
) -> Surrogate:
    """Return ``-sigmoid(tau * (ratio - 1)) * 4 / tau * A``, a smooth gate (SAPO, Gao et al. 2025).

    ``tau`` is ``gate_positive`` if A > 0, else ``gate_negative``. At ratio 1 the gradient is that of ``ratio * A``; it
    fades on both sides, and is never cut.
    """
    tau = torch.full_like(advantages, gate_negative).masked_fill(advantages > 0, gate_positive)
    gate = torch.sigmoid(tau * (log_ratio.exp() - 1.0)) * 4.0 / tau
    nowhere = torch.zeros_like(advantages, dtype=torch.bool)
    return Surrogate(-gate * advantages, nowhere, nowhere)


def dppo_tv(
    log_ratio: Float[Tensor, "tokens"],
    policy_logprobs: Float[Tensor, "tokens"],
    advantages: Float[Tensor, "tokens"],
    *,
    clip_low: float,
    clip_high: float,
) -> Surrogate:
    """Return ``-ratio * A``, or 0 if the token's probability moved too far in that direction (DPPO, Qi et al. 2026).

    Too far is ``pi - mu > clip_high`` with A > 0, or ``pi - mu < -clip_low`` with A < 0: the token's contribution to
    the total variation. A ratio bounds rare tokens too tightly (1e-5 to 1e-3 is ratio 100) and likely ones hardly.
    """
    pi, mu = policy_logprobs.detach().exp(), (policy_logprobs - log_ratio).detach().exp()
    low = (pi - mu < -clip_low) & (advantages < 0)
    high = (pi - mu > clip_high) & (advantages > 0)
    loss = -(log_ratio.exp() * advantages).masked_fill(low | high, 0.0)
    return Surrogate(loss, clipped_low=low, clipped_high=high)


def reinforce(
    log_ratio: Float[Tensor, "tokens"],
    policy_logprobs: Float[Tensor, "tokens"],
    advantages: Float[Tensor, "tokens"],
    *,
    clip_low: float,
    clip_high: float,
) -> Surrogate:
    """Return ``-ratio.detach() * A * logprob`` (Williams 1992; used by RLOO, Ahmadian et al. 2024).

    0 if the ratio has left ``1 - clip_low`` to ``1 + clip_high`` and the loss would move it further, as in
    :func:`ppo_clip`.
    """
    ratio = log_ratio.detach().exp()
    low = (ratio < 1.0 - clip_low) & (advantages < 0)
    high = (ratio > 1.0 + clip_high) & (advantages > 0)
    loss = -(ratio * advantages * policy_logprobs).masked_fill(low | high, 0.0)
    return Surrogate(loss, clipped_low=low, clipped_high=high)

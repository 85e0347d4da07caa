"""Importance log-ratios of the trained policy to the policy at the start of the update.

A sequence is one sample. An episode with several samples has a ratio of each: they share no sequence of tokens.
"""

from __future__ import annotations

from collections.abc import Callable
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

"""Importance ratios between the policy being trained and the policy at the start of the update, as log-ratios."""

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
    """Each token's own log-ratio [N] (PPO, Schulman et al. 2017)."""
    return log_ratio


def sequence_ratio(
    log_ratio: Float[Tensor, "tokens"], sequence_index: Int[Tensor, "tokens"], loss_mask: Bool[Tensor, "tokens"]
) -> Float[Tensor, "tokens"]:
    """The mean log-ratio of a token's sequence [N]: the geometric mean, not the product (GSPO, eq. 7).

    A product of ratios shrinks or explodes with length; its geometric mean has the same scale at any length.
    """
    return sequence_mean(log_ratio, sequence_index, loss_mask)[sequence_index]


def completion_ratio(
    log_ratio: Float[Tensor, "tokens"], sequence_index: Int[Tensor, "tokens"], loss_mask: Bool[Tensor, "tokens"]
) -> Float[Tensor, "tokens"]:
    """The summed log-ratio of a token's sequence [N], within ±20: a completion is one action (RLOO).

    With it, and with no other, an estimate from the policy that sampled is exact for the policy as it is now. Its
    spread grows with length, so it belongs into a clip.
    """
    totals = sequence_sum(log_ratio, sequence_index, loss_mask)
    return totals.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)[sequence_index]


def sequence_mean(
    values: Float[Tensor, "tokens"], sequence_index: Int[Tensor, "tokens"], loss_mask: Bool[Tensor, "tokens"]
) -> Float[Tensor, "sequences"]:
    """Mean over the unmasked tokens of each sequence: [N] to [S]; 0 for a sequence without any."""
    counts = sequence_sum(torch.ones_like(values), sequence_index, loss_mask)
    return sequence_sum(values, sequence_index, loss_mask) / counts.clamp(min=1.0)


def sequence_sum(
    values: Float[Tensor, "tokens"], sequence_index: Int[Tensor, "tokens"], loss_mask: Bool[Tensor, "tokens"]
) -> Float[Tensor, "sequences"]:
    """Sum over the unmasked tokens of each sequence: [N] to [S]."""
    num_sequences = int(sequence_index.max()) + 1 if len(sequence_index) else 0
    kept = values.masked_fill(~loss_mask, 0.0)
    return values.new_zeros(num_sequences).index_add(0, sequence_index, kept)


def clamped_difference(
    minuend: Float[Tensor, "tokens"], subtrahend: Float[Tensor, "tokens"], loss_mask: Bool[Tensor, "tokens"]
) -> Float[Tensor, "tokens"]:
    """``minuend - subtrahend`` of log-probabilities, 0 where masked, within ±20 so that its exponential is finite."""
    difference = (minuend - subtrahend).masked_fill(~loss_mask, 0.0)
    return difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)

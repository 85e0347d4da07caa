"""Importance ratios between the policy being trained and the policy at the start of the update, as log-ratios."""

from __future__ import annotations

from collections.abc import Callable

import torch

LOG_RATIO_LIMIT = 20.0

#: (log_ratio [N], sequence_index [N], loss_mask [N]) -> log_ratio [N]
RatioFn = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def token_ratio(log_ratio: torch.Tensor, sequence_index: torch.Tensor, loss_mask: torch.Tensor) -> torch.Tensor:
    """Each token's own log-ratio [N] (PPO, Schulman et al. 2017)."""
    return log_ratio


def sequence_ratio(log_ratio: torch.Tensor, sequence_index: torch.Tensor, loss_mask: torch.Tensor) -> torch.Tensor:
    """The mean log-ratio of a token's sequence [N]: the geometric mean, not the product (GSPO, eq. 7).

    A product of ratios shrinks or explodes with length; its geometric mean has the same scale at any length.
    """
    return sequence_mean(log_ratio, sequence_index, loss_mask)[sequence_index]


def sequence_mean(values: torch.Tensor, sequence_index: torch.Tensor, loss_mask: torch.Tensor) -> torch.Tensor:
    """Mean over the unmasked tokens of each sequence: [N] to [S]; 0 for a sequence without any."""
    num_sequences = int(sequence_index.max()) + 1 if len(sequence_index) else 0
    kept = values.masked_fill(~loss_mask, 0.0)
    sums = values.new_zeros(num_sequences).index_add(0, sequence_index, kept)
    counts = values.new_zeros(num_sequences).index_add(0, sequence_index, loss_mask.to(values.dtype))
    return sums / counts.clamp(min=1.0)


def clamped_difference(minuend: torch.Tensor, subtrahend: torch.Tensor, loss_mask: torch.Tensor) -> torch.Tensor:
    """``minuend - subtrahend`` of log-probabilities, 0 where masked, within ±20 so that its exponential is finite."""
    difference = (minuend - subtrahend).masked_fill(~loss_mask, 0.0)
    return difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)

"""Reward-model loss on preferences."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def bradley_terry(
    chosen_scores: torch.Tensor, rejected_scores: torch.Tensor, margins: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """``-logsigmoid(r_chosen - r_rejected - margin)`` summed with ``weights`` over [P] pairs (Bradley & Terry 1952).

    Weights are normalised over the whole optimizer step; a ranked list of K completions gives its K(K-1)/2 pairs,
    weighted so that each prompt counts once (Ouyang et al. 2022, eq. 1).
    """
    return -(weights * F.logsigmoid(chosen_scores - rejected_scores - margins)).sum()

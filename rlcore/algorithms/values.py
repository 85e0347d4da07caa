"""The critic's loss and how well it explains the returns."""

from __future__ import annotations

import torch


def value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, *, clip_range: float
) -> torch.Tensor:
    """``0.5 * max((V - R)^2, (clip(V, V_old ± clip_range) - R)^2)`` per token [N]; no clipping at ``clip_range`` 0."""
    loss = (values - returns).square()
    if clip_range > 0.0:
        clipped = old_values + (values - old_values).clamp(-clip_range, clip_range)
        loss = torch.maximum(loss, (clipped - returns).square())
    return 0.5 * loss


def explained_variance(values: torch.Tensor, returns: torch.Tensor) -> float:
    """``1 - Var(returns - values) / Var(returns)`` over [N] tokens; 0 where the returns do not vary.

    1: the critic is perfect; 0: no better than a constant; below 0: worse than a constant.
    """
    variance = returns.var(unbiased=False)
    if float(variance) <= 1e-12:
        return 0.0
    return float(1.0 - (returns - values).var(unbiased=False) / variance)

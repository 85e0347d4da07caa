"""Loss and explained variance of the critic."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Float


def value_loss(
    values: Float[Tensor, "tokens"],
    old_values: Float[Tensor, "tokens"],
    returns: Float[Tensor, "tokens"],
    *,
    clip_range: float,
) -> Float[Tensor, "tokens"]:
    """Return ``0.5 * max((V - R)^2, (clip(V, V_old ± clip_range) - R)^2)`` per token, [N]; no clip if it is 0."""
    loss = (values - returns).square()
    if clip_range > 0.0:
        clipped = old_values + (values - old_values).clamp(-clip_range, clip_range)
        loss = torch.maximum(loss, (clipped - returns).square())
    return 0.5 * loss


def explained_variance(values: Float[Tensor, "tokens"], returns: Float[Tensor, "tokens"]) -> float:
    """Return ``1 - Var(returns - values) / Var(returns)`` over [N] tokens; 0 if the returns do not vary.

    1 means a perfect critic, 0 one that is no better than a constant, and less than 0 one that is worse.
    """
    variance = returns.var(unbiased=False)
    if float(variance) <= 1e-12:
        return 0.0
    return float(1.0 - (returns - values).var(unbiased=False) / variance)

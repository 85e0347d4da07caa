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
    huber_delta: float = 0.0,
) -> Float[Tensor, "tokens"]:
    """Return ``0.5 * max((V - R)^2, (clip(V, V_old ± clip_range) - R)^2)`` per token, [N].

    ``clip_range`` 0 disables clipping. If ``huber_delta`` > 0, an error e beyond it counts
    ``2 * delta * (|e| - delta / 2)`` instead of e² (Huber 1964).
    """
    loss = _penalty(values - returns, huber_delta)
    if clip_range > 0.0:
        clipped = old_values + (values - old_values).clamp(-clip_range, clip_range)
        loss = torch.maximum(loss, _penalty(clipped - returns, huber_delta))
    return 0.5 * loss


def _penalty(error: Tensor, huber_delta: float) -> Tensor:
    if huber_delta == 0.0:
        return error.square()
    size = error.abs()
    return torch.where(size <= huber_delta, error.square(), huber_delta * (2.0 * size - huber_delta))


def explained_variance(values: Float[Tensor, "tokens"], returns: Float[Tensor, "tokens"]) -> float:
    """Return ``1 - Var(returns - values) / Var(returns)`` over [N] tokens; 0 if the returns do not vary.

    1 means a perfect critic, 0 one that is no better than a constant, and less than 0 one that is worse.
    """
    variance = returns.var(unbiased=False)
    if float(variance) <= 1e-12:
        return 0.0
    return float(1.0 - (returns - values).var(unbiased=False) / variance)

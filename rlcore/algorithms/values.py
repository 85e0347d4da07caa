"""The critic's loss and how well it explains the returns."""

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
    """``0.5 * max((V - R)^2, (clip(V, V_old ± clip_range) - R)^2)`` per token [N]; no clipping at ``clip_range`` 0.

    With ``huber_delta`` > 0 an error e beyond it counts ``2 * delta * (|e| - delta / 2)`` in place of e² (Huber 1964).
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
    """``1 - Var(returns - values) / Var(returns)`` over [N] tokens; 0 where the returns do not vary.

    1: the critic is perfect; 0: no better than a constant; below 0: worse than a constant.
    """
    variance = returns.var(unbiased=False)
    if float(variance) <= 1e-12:
        return 0.0
    return float(1.0 - (returns - values).var(unbiased=False) / variance)

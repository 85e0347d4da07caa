"""The loss of a critic over one micro-batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from rlcore.algorithms.values import value_loss
from rlcore.config import CriticConfig
from rlcore.training.minibatches import Columns
from rlcore.training.totals import Totals

if TYPE_CHECKING:
    from jaxtyping import Float


def critic_loss(
    columns: Columns, predicted: Float[Tensor, "tokens"], config: CriticConfig, totals: Totals
) -> Float[Tensor, ""]:
    """The weighted sum over the tokens of :func:`~rlcore.algorithms.values.value_loss`, a scalar with gradient.

    ``predicted``: float32 [N], the values of the batch's tokens, in its order. Counted in ``totals``.
    """
    device = predicted.device
    # Filled before any arithmetic: the gradient of a square is 0 * NaN where a masked target is NaN.
    masked = ~columns.get("loss_mask").to(device)
    per_token = value_loss(
        predicted.masked_fill(masked, 0.0),
        columns.get("values").to(device).masked_fill(masked, 0.0),
        columns.get("returns").to(device).masked_fill(masked, 0.0),
        clip_range=config.clip_range,
        huber_delta=config.huber_delta,
    )
    loss = (columns.weights.to(device) * per_token).sum()
    totals.add_loss("loss/value", loss)
    return loss

"""What each token counts in the loss. Weights are decided once over the whole optimizer step, the loss is a plain sum:
packing, micro-batches and data parallelism cannot change it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

#: loss_mask of every sequence of the optimizer step, padded: bool [S, T] -> weights [S, T], torch's default dtype
WeightingFn = Callable[[Tensor], Tensor]


def token_mean(loss_mask: Bool[Tensor, "sequences time"]) -> Float[Tensor, "sequences time"]:
    """Every token counts the same: ``1 / (number of tokens of the step)`` (DAPO, Yu et al. 2025, eq. 8)."""
    mask = loss_mask.to(torch.get_default_dtype())
    return mask / mask.sum().clamp(min=1.0)


def sequence_mean(loss_mask: Bool[Tensor, "sequences time"]) -> Float[Tensor, "sequences time"]:
    """Every sequence counts the same: ``1 / (S * its tokens)`` (GRPO, Shao et al. 2024, eq. 3).

    S counts the sequences that have a token to train; one that is masked as a whole is in neither sum.
    """
    mask = loss_mask.to(torch.get_default_dtype())
    lengths = mask.sum(1, keepdim=True)
    num_sequences = (lengths > 0).sum().clamp(min=1)
    return mask / lengths.clamp(min=1.0) / num_sequences


def sequence_sum(loss_mask: Bool[Tensor, "sequences time"]) -> Float[Tensor, "sequences time"]:
    """``1 / S`` for every token: the log-probabilities of a completion are summed (RLOO, Ahmadian et al. 2024)."""
    return constant(loss_mask, constant_length=1)


def constant(loss_mask: Bool[Tensor, "sequences time"], *, constant_length: int) -> Float[Tensor, "sequences time"]:
    """``1 / (S * constant_length)`` for a fixed length, so that long answers are not favoured (Dr. GRPO, Liu
    et al. 2025)."""
    mask = loss_mask.to(torch.get_default_dtype())
    num_sequences = mask.any(1).sum().clamp(min=1)
    return mask / (num_sequences * float(constant_length))


#: By name, for a run's configuration; ``constant`` needs its ``constant_length`` bound first.
WEIGHTINGS: Mapping[str, Callable[..., Tensor]] = {
    "token_mean": token_mean,
    "sequence_mean": sequence_mean,
    "sequence_sum": sequence_sum,
    "constant": constant,
}

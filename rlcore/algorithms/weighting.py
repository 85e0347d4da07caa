"""Token weights of the loss.

Weights are computed once for the whole optimizer step, and the loss is a plain weighted sum. Packing, micro-batches
and data parallelism therefore cannot change it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

#: Padded loss_mask of all sequences of the step, bool [S, T] -> weights [S, T] in torch's default dtype
WeightingFn = Callable[[Tensor], Tensor]


def token_mean(loss_mask: Bool[Tensor, "sequences time"]) -> Float[Tensor, "sequences time"]:
    """Weight all tokens equally: ``1 / (number of tokens of the step)`` (DAPO, Yu et al. 2025, eq. 8)."""
    mask = loss_mask.to(torch.get_default_dtype())
    return mask / mask.sum().clamp(min=1.0)


def sequence_mean(loss_mask: Bool[Tensor, "sequences time"]) -> Float[Tensor, "sequences time"]:
    """Weight all sequences equally: ``1 / (S * tokens of the sequence)`` (GRPO, Shao et al. 2024, eq. 3).

    S is the number of sequences with at least one trained token.
    """
    mask = loss_mask.to(torch.get_default_dtype())
    lengths = mask.sum(1, keepdim=True)
    num_sequences = (lengths > 0).sum().clamp(min=1)
    return mask / lengths.clamp(min=1.0) / num_sequences


def sequence_sum(loss_mask: Bool[Tensor, "sequences time"]) -> Float[Tensor, "sequences time"]:
    """Weight every token ``1 / S``, which sums log-probabilities per completion (RLOO, Ahmadian et al. 2024)."""
    return constant(loss_mask, constant_length=1)


def constant(loss_mask: Bool[Tensor, "sequences time"], *, constant_length: int) -> Float[Tensor, "sequences time"]:
    """Weight every token ``1 / (S * constant_length)``: no bias to long completions (Dr. GRPO, Liu et al. 2025)."""
    mask = loss_mask.to(torch.get_default_dtype())
    num_sequences = mask.any(1).sum().clamp(min=1)
    return mask / (num_sequences * float(constant_length))


#: Weightings by configuration name; ``constant`` needs its ``constant_length`` bound first.
WEIGHTINGS: Mapping[str, Callable[..., Tensor]] = {
    "token_mean": token_mean,
    "sequence_mean": sequence_mean,
    "sequence_sum": sequence_sum,
    "constant": constant,
}

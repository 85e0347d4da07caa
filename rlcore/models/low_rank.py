"""Frozen linear layer with a low-rank addition, ``x W' + b + s (x A') B'``, with a fused backward pass.

Separate operations would copy and sum the whole output, and the whole input gradient in the backward pass. Here the
products accumulate in place. Source: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models", eq. 3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from rlcore.hardware.precision import at_least_float32, product

if TYPE_CHECKING:
    from jaxtyping import Float


def low_rank_linear(
    inputs: Float[Tensor, "... input"],
    weight: Float[Tensor, "output input"],
    bias: Float[Tensor, "output"] | None,
    down: Float[Tensor, "rank input"],
    up: Float[Tensor, "output rank"],
    scaling: float,
) -> Float[Tensor, "... output"]:
    """Return the layer's output, [..., O], with gradients for ``inputs``, ``down`` and ``up``.

    Products are in the precision of ``weight``, or in that of an active autocast, and their sum under autocast at least
    float32: to a half-precision output of the layer, a small addition is rounded away. Gradients have their tensors'
    precision.

    Args:
        inputs: [..., I].
        weight: [O, I], frozen, as is ``bias``, [O].
        down: A, [rank, I].
        up: B, [O, rank].
        scaling: s, alpha / rank.
    """
    kind = inputs.device.type
    is_wide = torch.is_autocast_enabled(kind)
    dtype = torch.get_autocast_dtype(kind) if is_wide else weight.dtype
    output: Tensor = _LowRankLinear.apply(inputs, weight, bias, down, up, scaling, dtype, is_wide)  # type: ignore[no-untyped-call]
    return output


class _LowRankLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        down: Tensor,
        up: Tensor,
        scaling: float,
        dtype: torch.dtype,
        is_wide: bool,
    ) -> Tensor:
        with torch.autocast(inputs.device.type, enabled=False):
            adapter_dtype = down.dtype
            rows, weight, down, up = (each.to(dtype) for each in (inputs.flatten(0, -2), weight, down, up))
            output = product(rows, weight.T) if bias is None else functional.linear(rows, weight, bias.to(dtype))
            narrow = rows @ down.T  # [N, rank]
            if is_wide:
                output = at_least_float32(output)
            output.addmm_(narrow.to(output), up.T.to(output), alpha=scaling)
        ctx.save_for_backward(rows, weight, down, up, narrow)
        ctx.scaling, ctx.shape, ctx.input_dtype, ctx.adapter_dtype = scaling, inputs.shape, inputs.dtype, adapter_dtype
        return output.view(*inputs.shape[:-1], output.shape[-1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, down, up, narrow = ctx.saved_tensors
        gradient = gradients[0].flatten(0, -2).to(weight.dtype)
        # On a CPU G' Z, with Z of [N, 8], takes eight times as long as Z' G, and G B three times as long as B' G'.
        of_narrow = (up.T.contiguous() @ gradient.T).mul_(ctx.scaling)  # [rank, N]
        of_inputs = None
        if ctx.needs_input_grad[0]:
            of_inputs = product(gradient, weight).addmm_(of_narrow.T, down).view(ctx.shape).to(ctx.input_dtype)
        of_down, of_up = of_narrow @ rows, (narrow.T @ gradient).mul_(ctx.scaling).T
        return of_inputs, None, None, of_down.to(ctx.adapter_dtype), of_up.to(ctx.adapter_dtype), None, None, None

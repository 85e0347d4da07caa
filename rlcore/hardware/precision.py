"""Precision of a model's matrix products, stored on the model and not in a surrounding context, and their kernels.

Trained weights are always float32: in bfloat16 a small learning rate rounds to no update. If such a model computes in
half precision (:func:`set_compute_dtype`), the backbone casts its weights in every forward pass. Autocast's weight
cache stays off: a context that outlives an optimizer step would keep using the old weights.

Losses, advantages, rewards, scalar heads and statistics are float32.
"""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

import torch
from torch import Tensor

from rlcore.hardware.memory import is_large
from rlcore.hardware.sharded import device_of

if TYPE_CHECKING:
    from jaxtyping import Float

Model = TypeVar("Model", bound=torch.nn.Module)
_MARK = "_compute_dtype"
# Below, a call of oneDNN costs more than it gains: numbers of a weight, multiplications of a product.
_LEAST_WORK = 2**21
_HAS_ONEDNN = torch._C._has_mkldnn and platform.machine() in ("x86_64", "AMD64")  # elsewhere it was never tried


def set_compute_dtype(model: Model, dtype: torch.dtype) -> Model:
    """Set the precision of the model's products (float32, bfloat16, float16); return the model."""
    setattr(model, _MARK, dtype)
    return model


def cast_linears(model: Any, dtype: torch.dtype) -> Any:
    """Cast linear weights to ``dtype`` and compute the model's products in it; return the model.

    Autocast casts no other weights, so the outputs equal bit for bit those of a policy with float32 weights that starts
    from the same checkpoint. A head that is tied to the embedding is not cast.
    """
    embedding = model.get_input_embeddings().weight
    for module in model.modules():
        if isinstance(module, torch.nn.Linear) and module.weight is not embedding:
            module.to(dtype)
    return set_compute_dtype(model, dtype)


def compute_dtype(model: Any) -> torch.dtype:
    """Return the precision of the model's products, by default that of its weights."""
    dtype: torch.dtype = getattr(getattr(model, "base", model), _MARK, model.dtype)
    return dtype


def autocast(model: Any) -> torch.autocast:
    """Return the context of one forward pass of ``model``, which overrides any surrounding context."""
    dtype = compute_dtype(model)
    is_cast = dtype.itemsize < model.dtype.itemsize
    return torch.autocast(
        device_of(model).type, dtype=dtype if is_cast else torch.bfloat16, enabled=is_cast, cache_enabled=False
    )


def no_autocast(tensor: Float[Tensor, "..."]) -> torch.autocast:
    """Return a context in which products have the precision of their operands."""
    return torch.autocast(tensor.device.type, dtype=torch.bfloat16, enabled=False)


def at_least_float32(values: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Cast half precision to float32; float64 is unchanged, for exactness tests."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def wide_product(
    left: Float[Tensor, "rows inner"], right: Float[Tensor, "inner columns"]
) -> Float[Tensor, "rows columns"]:
    """Return ``left @ right``, at least float32.

    On a GPU, half-precision operands are summed and returned in float32. A CPU has no such product: the sum is rounded
    once to the precision of the operands.
    """
    if left.device.type == "cuda" and left.dtype.itemsize == 2:
        found: Tensor = torch.mm(left, right, out_dtype=torch.float32)
        return found
    return at_least_float32(product(left, right))


def product(left: Float[Tensor, "rows inner"], right: Float[Tensor, "inner columns"]) -> Float[Tensor, "rows columns"]:
    """Return ``left @ right``; a large one in float32 on a CPU, which needs no gradient, by oneDNN.

    PyTorch calls MKL, which uses half of the vector width of AMD's processors.
    """
    is_differentiated = torch.is_grad_enabled() and (left.requires_grad or right.requires_grad)
    if is_differentiated or left.numel() * right.shape[1] < _LEAST_WORK or not (_is_plain(left) and _is_plain(right)):
        return left @ right
    return linear_of(left, right.T)


def linear_of(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``inputs @ weight.T + bias``, [..., O], by oneDNN, without gradient.

    Args:
        inputs: [..., I].
        weight: [O, I], possibly in oneDNN's blocked layout.
        bias: [O].
    """
    found: Tensor = torch.ops.mkldnn._linear_pointwise(inputs, weight, bias, "none", [], "")
    return found


def has_onednn(weight: Tensor) -> bool:
    """Return True if a weight is on a CPU with oneDNN, and large enough that a call costs less than its product."""
    return weight.device.type == "cpu" and _HAS_ONEDNN and is_large(weight.numel())


def gains_packed(device: torch.device, dtype: torch.dtype) -> bool:
    """Return True if products with large weights are faster in oneDNN's blocked layout."""
    if device.type != "cpu" or not _HAS_ONEDNN:
        return False
    has_bfloat16: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype == torch.float32 or (dtype == torch.bfloat16 and has_bfloat16)


def is_linear(module: torch.nn.Module) -> TypeGuard[torch.nn.Linear]:
    """Return True for a linear layer that computes nothing else."""
    return type(module) in (torch.nn.Linear, Linear)


def use_onednn(model: Model) -> Model:
    """Compute the linear layers of a model, and their gradients, by :func:`product`; return the model."""
    for module in model.modules():
        if type(module) is torch.nn.Linear:
            module.__class__ = Linear
    return model


class Linear(torch.nn.Linear):
    """Linear layer that computes by :func:`product`."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Return the layer's output [..., O] for inputs [..., I]."""
        if not (has_onednn(self.weight) and _is_plain(self.weight) and _is_plain(input)):
            return super().forward(input)
        output: Tensor = _Product.apply(input.reshape(-1, self.in_features), self.weight)  # type: ignore[no-untyped-call]
        output = output if self.bias is None else output + self.bias
        return output.view(*input.shape[:-1], self.out_features)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        return product(inputs, weight.T)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,), (inputs, weight) = gradients, ctx.saved_tensors
        of_inputs = product(gradient, weight) if ctx.needs_input_grad[0] else None
        return of_inputs, product(gradient.T, inputs) if ctx.needs_input_grad[1] else None


def _is_plain(tensor: Tensor) -> bool:
    is_whole = type(tensor) in (Tensor, torch.nn.Parameter)
    is_single = tensor.device.type == "cpu" and tensor.dtype == torch.float32
    return is_whole and is_single and _HAS_ONEDNN and not torch.is_autocast_enabled("cpu")

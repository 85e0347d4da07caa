"""Precision of a model's matrix products, stored on the model and not in a surrounding context.

Trained weights are always float32: in bfloat16 a small learning rate rounds to no update. If such a model computes in
half precision (:func:`set_compute_dtype`), the backbone casts its weights in every forward pass. Autocast's weight
cache stays off: it is cleared only when the outermost context ends, so a context that outlives an optimizer step would
keep using the old weights.

Losses, advantages, rewards, scalar heads and statistics are float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from rlcore.distributed.sharded import device_of

if TYPE_CHECKING:
    from jaxtyping import Float

Model = TypeVar("Model", bound=torch.nn.Module)
_MARK = "_compute_dtype"


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
        product: Tensor = torch.mm(left, right, out_dtype=torch.float32)
        return product
    return at_least_float32(left @ right)

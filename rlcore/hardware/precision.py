"""The precision of a model's matrix products. It belongs to the model, not to a context around it.

Weights that learn are float32 always: in bfloat16 a small learning rate rounds to no update at all. If such a model
computes in half precision (:func:`set_compute_dtype`), the backbone casts its weights in every forward pass. Autocast's
cache of cast weights stays off: it is emptied only when the outermost context ends, so a context that outlives an
optimizer step would continue with the old weights.

Everything outside of backbone and head computes in float32: losses, advantages, rewards, scalar heads, statistics.
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
    """Let the products of ``model`` be computed in ``dtype`` (float32, bfloat16, float16); returns the model itself."""
    setattr(model, _MARK, dtype)
    return model


def cast_linears(model: Any, dtype: torch.dtype) -> Any:
    """Keep the weights of linear layers in ``dtype``, and let the products of ``model`` be computed in it; returns it.

    Autocast casts no other weights, so the model computes bit for bit what it would with all of them in float32: what a
    policy computes that starts from the same checkpoint. A head that is the embedding's own tensor stays as it is.
    """
    embedding = model.get_input_embeddings().weight
    for module in model.modules():
        if isinstance(module, torch.nn.Linear) and module.weight is not embedding:
            module.to(dtype)
    return set_compute_dtype(model, dtype)


def compute_dtype(model: Any) -> torch.dtype:
    """The precision of the model's products: what :func:`set_compute_dtype` said, else that of its weights."""
    dtype: torch.dtype = getattr(getattr(model, "base", model), _MARK, model.dtype)
    return dtype


def autocast(model: Any) -> torch.autocast:
    """The context of one forward pass of ``model``; it holds against any context around it."""
    dtype = compute_dtype(model)
    is_cast = dtype.itemsize < model.dtype.itemsize
    return torch.autocast(
        device_of(model).type, dtype=dtype if is_cast else torch.bfloat16, enabled=is_cast, cache_enabled=False
    )


def no_autocast(tensor: Float[Tensor, "..."]) -> torch.autocast:
    """The context in which products are computed in the precision of their operands."""
    return torch.autocast(tensor.device.type, dtype=torch.bfloat16, enabled=False)


def at_least_float32(values: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Half precision to float32; float64 stays, so that exactness can be checked in it."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def wide_product(
    left: Float[Tensor, "rows inner"], right: Float[Tensor, "inner columns"]
) -> Float[Tensor, "rows columns"]:
    """``left @ right`` of matrices, at least float32.

    On a GPU half-precision operands are summed and returned in float32; on a CPU there is no such product, and the sum
    is rounded to the operands' precision once.
    """
    if left.device.type == "cuda" and left.dtype.itemsize == 2:
        product: Tensor = torch.mm(left, right, out_dtype=torch.float32)
        return product
    return at_least_float32(left @ right)

"""Products of float16 matrices at the speed of float32, on a processor that has no units for them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten
_PRODUCTS = (_aten.mm.default, _aten.bmm.default, _aten.addmm.default, _aten.baddbmm.default)


def fast_float16() -> AbstractContextManager[Any]:
    """The context in which a processor without units for float16 multiplies it in bearable time."""
    return nullcontext() if torch.ops.mkldnn._is_mkldnn_fp16_supported() else Float16Products()


class Float16Products(TorchDispatchMode):  # type: ignore[misc]
    """Takes a product in float32 from its float16 operands and rounds it to float16 once, as units for float16 do.

    torch's own loop differs from it by the order of its sums, and takes 18 times as long as a product in float32.
    """

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function in _PRODUCTS and args[0].dtype == torch.float16:
            wide = [each.float() if isinstance(each, torch.Tensor) else each for each in args]
            return function(*wide, **(kwargs or {})).to(torch.float16)
        return function(*args, **(kwargs or {}))

"""A watch over every tensor that is made, for tests that something large never is."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class LargestTensor(TorchDispatchMode):
    """Remembers the number of elements of the largest tensor that any operation gave, backward included."""

    def __init__(self) -> None:
        super().__init__()
        self.num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for item in result if isinstance(result, tuple | list) else (result,):
            if isinstance(item, torch.Tensor):
                self.num_elements = max(self.num_elements, item.numel())
        return result

"""A device that runs out of memory: a fault that cannot be provoked on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import nn


@contextmanager
def room_for(
    model: nn.Module, tokens: int, *, fails: Literal["forward", "backward"] = "forward"
) -> Iterator[list[int]]:
    """Micro-batches of more than ``tokens`` positions run out of memory; yields the sizes that were tried.

    In the backward pass the error comes at its very end, when every layer has left a gradient already.
    """
    tried: list[int] = []

    def watch(module: nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        size = int(inputs[0].numel())
        tried.append(size)
        if size > tokens and fails == "forward":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        if size > tokens and torch.is_grad_enabled():
            if not output.requires_grad:  # the weights of the embedding are frozen
                output = output.clone().requires_grad_()
            output.register_hook(_fail)
        return output

    handle = model.get_input_embeddings().register_forward_hook(watch)
    try:
        yield tried
    finally:
        handle.remove()


def _fail(_: torch.Tensor) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

"""Memory of models, optimizers and caches, and its peak, measured in the first update that takes a step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from rlcore.models.lora import AdaptedModel


def kv_cache_bytes(config: PretrainedConfig, *, num_sequences: int, num_tokens: int, bytes_per_number: int) -> int:
    """Return the bytes of keys and values of ``num_sequences`` sequences of ``num_tokens`` each."""
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * width * bytes_per_number
    return int(per_token * num_sequences * num_tokens)


def num_parameters(policy: PreTrainedModel | AdaptedModel) -> int:
    """Return P, the number of parameters without any adapter."""
    base = policy.base if isinstance(policy, AdaptedModel) else policy
    return sum(parameter.numel() for path, parameter in base.named_parameters() if ".lora_" not in path)


def weight_bytes(models: Iterable[PreTrainedModel | AdaptedModel | nn.Module | None]) -> int:
    """Return the bytes of all weights and buffers, counting tensors shared by several models once."""
    sizes: dict[int, int] = {}
    for model in models:
        for module in _with_base(model):
            for tensor in (*module.parameters(), *module.buffers()):
                storage = tensor.untyped_storage()
                sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def optimizer_bytes(optimizers: Iterable[torch.optim.Optimizer]) -> int:
    """Return the bytes of all optimizer state tensors."""
    return sum(
        value.untyped_storage().nbytes()
        for optimizer in optimizers
        for entry in optimizer.state.values()
        for value in entry.values()
        if isinstance(value, torch.Tensor)
    )


class PeakMeter:
    """Peak bytes of ``activations`` and ``gradients`` during :func:`measure_peak`."""

    def __init__(self, weights: int, pointers: frozenset[int]) -> None:
        self.weights, self.activations, self.gradients = weights, 0, 0
        self._weights = pointers
        self._held: dict[int, tuple[int, int]] = {}  # storage -> (bytes, number of saved tensors)
        self._now = 0

    def _keep(self, tensor: torch.Tensor) -> _Kept:
        storage = tensor.untyped_storage()
        pointer = storage.data_ptr()
        if pointer in self._weights:
            return _Kept(self, tensor, 0)
        size, count = self._held.get(pointer, (storage.nbytes(), 0))
        self._held[pointer] = size, count + 1
        self._now += size if count == 0 else 0
        self.activations = max(self.activations, self._now)
        return _Kept(self, tensor, pointer)

    def release(self, pointer: int) -> None:
        size, count = self._held.pop(pointer)
        if count > 1:
            self._held[pointer] = size, count - 1
        else:
            self._now -= size

    def see_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Record the gradients before an optimizer step."""
        held = sum(p.grad.untyped_storage().nbytes() for p in parameters if p.grad is not None)
        self.gradients = max(self.gradients, held)


@contextmanager
def measure_peak(
    models: Iterable[PreTrainedModel | AdaptedModel | nn.Module | None], optimizers: Iterable[torch.optim.Optimizer]
) -> Iterator[PeakMeter]:
    """Measure an update without changing its results.

    Activations that a checkpointed region (the head's chunks) recomputes in its backward pass are not counted.
    """
    models, optimizers = list(models), list(optimizers)
    modules = [module for model in models for module in _with_base(model)]
    pointers = frozenset(p.untyped_storage().data_ptr() for module in modules for p in module.parameters())
    meter = PeakMeter(weight_bytes(models), pointers)
    learning = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]

    def before_step(*_: Any) -> None:
        meter.see_gradients(learning)

    handles = [optimizer.register_step_pre_hook(before_step) for optimizer in optimizers]
    try:
        with torch.autograd.graph.saved_tensors_hooks(meter._keep, _Kept.tensor_of):
            yield meter
    finally:
        for handle in handles:
            handle.remove()


class _Kept:
    """Tensor that autograd keeps until it is deleted."""

    __slots__ = ("_meter", "_pointer", "_tensor")

    def __init__(self, meter: PeakMeter, tensor: torch.Tensor, pointer: int) -> None:
        self._meter, self._tensor, self._pointer = meter, tensor, pointer

    def __del__(self) -> None:
        if self._pointer:
            self._meter.release(self._pointer)

    def tensor_of(self) -> torch.Tensor:
        return self._tensor


def _with_base(model: PreTrainedModel | AdaptedModel | nn.Module | None) -> list[nn.Module]:
    if model is None:
        return []
    bases = [module.base for module in model.modules() if isinstance(module, AdaptedModel)]
    return [model, *bases]

"""What online RL holds in memory, by part: computed before a run, and measured in its first update that takes a step.

In multiples of the policy's parameters P (float32, 4 bytes each): what learns is held four times (weights, gradients,
Adam's two moments), what is frozen once, in the precision that it is loaded in.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from rlcore.models.lora import AdaptedModel

FLOAT32, BFLOAT16 = 4, 2  # bytes
Recipe = Literal["ppo", "rlvr_ppo", "grpo", "rlvr_grpo"]
Placement = Literal["separate", "shared", "lora"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Footprint:
    """Peak bytes by part. ``activations``: what the forward passes of the update keep for their backward passes."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    kv_cache: int

    @property
    def total(self) -> int:
        """All parts together: an upper bound, since sampling and updating take turns."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.kv_cache

    def metrics(self, num_parameters: int) -> dict[str, float]:
        """The figures to log, with the total in multiples of the policy's ``num_parameters``."""
        parts = ("weights", "gradients", "optimizer", "activations", "kv_cache", "total")
        figures = {f"memory/{part}_bytes": float(getattr(self, part)) for part in parts}
        return figures | {
            "memory/total_multiple": self.total / (FLOAT32 * num_parameters),
            "memory/total_multiple_bf16": self.total / (BFLOAT16 * num_parameters),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """Which models a run holds. ``num_adapter``: parameters of one adapter, 0 where all of the policy learns.

    ``reference``: whether the KL needs one (``kl.coefficient`` > 0); ``own_reference``: it is not the policy's start.
    ``reward_model_is_adapter``: of the policy's base.
    ``engine``: whether the engine's copy lies beside the learner.
    """

    recipe: Recipe
    num_parameters: int
    num_adapter: int = 0
    placement: Placement = "separate"
    reference: bool = True
    own_reference: bool = False
    reward_model_is_adapter: bool = False
    engine: bool = True
    frozen_bytes: int = FLOAT32  # per parameter of what does not learn
    moment_bytes: int = FLOAT32  # per parameter that learns and moment; 1 with ``optim.kind = "adamw_8bit"``


def expected(plan: MemoryPlan, *, activations: int = 0, kv_cache: int = 0) -> Footprint:
    """The footprint of a plan; an engine holds a frozen copy of its own, and heads of one column are left out."""
    uses_critic = plan.recipe in ("ppo", "rlvr_ppo")
    critic = {"separate": plan.num_parameters, "shared": 0, "lora": plan.num_adapter}[plan.placement]
    learning = (plan.num_adapter or plan.num_parameters) + (critic if uses_critic else 0)
    copies = 1 if plan.engine else 0
    # With an adapter the policy stands on a frozen base, and that base is the reference.
    copies += 1 if plan.num_adapter or plan.reference else 0
    copies += 1 if plan.num_adapter and plan.reference and plan.own_reference else 0
    needs_judge = plan.recipe in ("ppo", "grpo")
    copies += 1 if needs_judge and not plan.reward_model_is_adapter else 0
    judge = plan.num_adapter * FLOAT32 if needs_judge and plan.reward_model_is_adapter else 0
    return Footprint(
        weights=FLOAT32 * learning + plan.frozen_bytes * copies * plan.num_parameters + judge,
        gradients=FLOAT32 * learning,
        optimizer=2 * plan.moment_bytes * learning,
        activations=activations,
        kv_cache=kv_cache,
    )


def kv_cache_bytes(config: PretrainedConfig, *, num_sequences: int, num_tokens: int, bytes_per_number: int) -> int:
    """Keys and values of ``num_sequences`` sequences that are decoded together, each of up to ``num_tokens``."""
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * width * bytes_per_number
    return int(per_token * num_sequences * num_tokens)


def num_parameters(policy: PreTrainedModel | AdaptedModel) -> int:
    """P: of the model itself, without any adapter."""
    base = policy.base if isinstance(policy, AdaptedModel) else policy
    return sum(parameter.numel() for path, parameter in base.named_parameters() if ".lora_" not in path)


def weight_bytes(models: Iterable[PreTrainedModel | AdaptedModel | nn.Module | None]) -> int:
    """Bytes of all weights and buffers, each tensor once however many models share it."""
    sizes: dict[int, int] = {}
    for model in models:
        for module in _with_base(model):
            for tensor in (*module.parameters(), *module.buffers()):
                storage = tensor.untyped_storage()
                sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def optimizer_bytes(optimizers: Iterable[torch.optim.Optimizer]) -> int:
    """Bytes of all tensors that optimizers keep beside the parameters."""
    return sum(
        value.untyped_storage().nbytes()
        for optimizer in optimizers
        for entry in optimizer.state.values()
        for value in entry.values()
        if isinstance(value, torch.Tensor)
    )


class PeakMeter:
    """The largest sums of bytes seen at once while :func:`measure_peak`: ``activations``, and ``gradients``."""

    def __init__(self, weights: int, pointers: frozenset[int]) -> None:
        self.weights, self.activations, self.gradients = weights, 0, 0
        self._weights = pointers
        self._held: dict[int, tuple[int, int]] = {}  # storage to (bytes, how often it is kept)
        self._now = 0

    def keep(self, tensor: torch.Tensor) -> _Kept:
        """Count a tensor that autograd keeps for the backward pass; one storage counts once, a weight never."""
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
        """Autograd let go of a tensor."""
        size, count = self._held.pop(pointer)
        if count > 1:
            self._held[pointer] = size, count - 1
        else:
            self._now -= size

    def see_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Note the gradients that stand before an optimizer step."""
        held = sum(p.grad.untyped_storage().nbytes() for p in parameters if p.grad is not None)
        self.gradients = max(self.gradients, held)


@contextmanager
def measure_peak(
    models: Iterable[PreTrainedModel | AdaptedModel | nn.Module | None], optimizers: Iterable[torch.optim.Optimizer]
) -> Iterator[PeakMeter]:
    """Measure an update from within: nothing that is computed changes by a bit.

    What a checkpointed region (the chunks of the head) computes again in its backward pass is not in the figure.
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
        with torch.autograd.graph.saved_tensors_hooks(meter.keep, _Kept.tensor_of):
            yield meter
    finally:
        for handle in handles:
            handle.remove()


class _Kept:
    """A tensor that autograd keeps; its end is the end of the tensor's stay."""

    __slots__ = ("_meter", "_pointer", "_tensor")

    def __init__(self, meter: PeakMeter, tensor: torch.Tensor, pointer: int) -> None:
        self._meter, self._tensor, self._pointer = meter, tensor, pointer

    def __del__(self) -> None:
        if self._pointer:
            self._meter.release(self._pointer)

    def tensor_of(self) -> torch.Tensor:
        """The tensor itself, unchanged."""
        return self._tensor


def _with_base(model: PreTrainedModel | AdaptedModel | nn.Module | None) -> list[nn.Module]:
    """A model and the frozen base below it, which is no submodule."""
    if model is None:
        return []
    bases = [module.base for module in model.modules() if isinstance(module, AdaptedModel)]
    return [model, *bases]

"""Device, precision and gradient checkpointing of loaded models."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from rlcore.config import LoraConfig
from rlcore.errors import ModelError
from rlcore.hardware.precision import cast_linears, set_compute_dtype
from rlcore.models.loading import load_policy
from rlcore.models.lora import activate, active_name


@dataclass(frozen=True, kw_only=True, slots=True)
class Runtime:
    """Device and precision of a stage.

    Attributes:
        compute_dtype: dtype of backbone and head products; trained weights are float32.
        like_start: Save trained weights in the precision of the start. False if products are float32: the engine would
            then serve other numbers.
    """

    device: torch.device
    compute_dtype: torch.dtype
    gradient_checkpointing: bool = False
    like_start: bool = False

    def load_trainable(self, folder: Path) -> PreTrainedModel:
        """Load a model with float32 weights: in bfloat16 a small learning rate rounds to no update."""
        model = set_compute_dtype(load_policy(folder, device=self.device, dtype=torch.float32), self.compute_dtype)
        return enable_gradient_checkpointing(model) if self.gradient_checkpointing else model

    def load_frozen(self, folder: Path) -> PreTrainedModel:
        """Load a model for inference, in the compute precision."""
        model = load_policy(folder, device=self.device, dtype=self.compute_dtype)
        return model.requires_grad_(False)

    def load_reference(self, folder: Path) -> PreTrainedModel:
        """Load a frozen model whose outputs equal those of a newly loaded trainable one, bit for bit.

        In half precision they would differ by rounding, which the KL penalty would train on.
        """
        model = load_policy(folder, device=self.device, dtype=torch.float32)
        return cast_linears(model, self.compute_dtype).requires_grad_(False)

    def of_native_engine(self, adapter: LoraConfig) -> Runtime:
        """Return the runtime of the native engine for a policy with this LoRA: float32.

        In half precision, base plus a small adapter rounds back to the base: some steps would sample from the start.
        """
        return replace(self, compute_dtype=torch.float32) if adapter.rank else self

    def load_base(self, folder: Path, *, as_vllm: bool = False) -> PreTrainedModel:
        """Load a frozen base for trained adapters, as :meth:`load_reference`: its states and sums are float32.

        ``as_vllm``: in half precision as vLLM computes, which rounds small additions of an adapter away. Float32 sums
        would differ from it three times as much (SmolLM2, bfloat16: 0.28 instead of 0.09 of log-odds).
        """
        model = self.load_frozen(folder) if as_vllm else self.load_reference(folder)
        return enable_gradient_checkpointing(model) if self.gradient_checkpointing else model


def enable_gradient_checkpointing(model: PreTrainedModel) -> PreTrainedModel:
    """Recompute the activations of every layer in the backward pass: less memory, about a third more time.

    transformers checkpoints in training mode only, which would enable dropout. Only the layers are therefore set to it,
    with dropout 0. Recomputation uses its forward pass's adapter.

    Raises:
        ModelError: The architecture does not support it.
    """
    layers = [module for module in model.base_model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers or not model.supports_gradient_checkpointing:
        raise ModelError(
            f"{type(model).__name__} does not support gradient checkpointing",
            fix="set hardware.gradient_checkpointing = false, and lower tokens_per_microbatch",
        )
    settings = {"use_reentrant": False, "preserve_rng_state": False, "context_fn": partial(_contexts, model)}
    model.gradient_checkpointing_enable(settings)
    for layer in layers:
        layer.training = True
        for field, value in vars(layer).items():
            if "dropout" in field and isinstance(value, float):  # a few layers apply dropout themselves
                setattr(layer, field, 0.0)
    return model


class _Adapter(AbstractContextManager[None]):
    """Context with the adapter ``name`` active on ``base``."""

    def __init__(self, base: PreTrainedModel, name: str) -> None:
        self._base, self._name, self._before = base, name, name

    def __enter__(self) -> None:
        self._before = active_name(self._base)
        if self._before != self._name:  # walking through the whole model costs time
            activate(self._base, self._name)

    def __exit__(self, *_: object) -> None:
        if self._before != self._name:
            activate(self._base, self._before)


def _contexts(model: PreTrainedModel) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return nullcontext(), _Adapter(model, active_name(model))

"""Gradient checkpointing: recompute activations in the backward pass, which saves memory and costs time."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial

from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from rlcore.errors import ModelError
from rlcore.models.lora import activate, active_name


def enable_gradient_checkpointing(model: PreTrainedModel) -> PreTrainedModel:
    """Enable gradient checkpointing for every layer of the backbone; return the model. Costs about a third more time.

    transformers checkpoints in training mode only, which would enable dropout. Only the layers themselves are therefore
    set to training mode, with dropout 0, and their submodules are not. A copy in evaluation mode decodes as usual.

    Adapters may be added later: recomputation uses the adapter of its forward pass, whichever is active then.

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
    # The older name is removed in transformers 6.
    new, old = "activation_checkpointing_enable", "gradient_checkpointing_enable"
    getattr(model, new if hasattr(model, new) else old)(settings)
    for layer in layers:
        layer.training = True
        for field, value in vars(layer).items():
            if "dropout" in field and isinstance(value, float):  # a few layers apply dropout themselves
                setattr(layer, field, 0.0)
    return model


class _Adapter(AbstractContextManager[None]):
    """Context with the adapter ``name`` active on ``base``; restores the previous one. Reentrant in sequence."""

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
    """Return the contexts of a layer's forward pass and of its recomputation."""
    return nullcontext(), _Adapter(model, active_name(model))

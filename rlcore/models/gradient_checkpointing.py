"""Less memory for more time: a layer's activations are computed again in the backward pass, not kept."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial

from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from rlcore.errors import ModelError
from rlcore.models.lora import activate, active_name


def enable_gradient_checkpointing(model: PreTrainedModel) -> PreTrainedModel:
    """Let every layer of the backbone keep its input alone; returns the model itself. About a third more time.

    The library does so in training mode only, which would turn dropout on: so the layers are put into it by
    themselves, without a dropout of their own, and their parts, which hold the rest of it, are not. A copy in
    evaluation mode decodes as usual.

    Adapters may be put on the model afterwards: what is computed again has the adapter of its forward pass, whichever
    is on by then.

    Raises:
        ModelError: the architecture cannot.
    """
    layers = [module for module in model.base_model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers or not model.supports_gradient_checkpointing:
        raise ModelError(
            f"{type(model).__name__} cannot compute its layers again",
            fix="set hardware.gradient_checkpointing = false, and lower tokens_per_microbatch",
        )
    settings = {"use_reentrant": False, "preserve_rng_state": False, "context_fn": partial(_contexts, model)}
    # The older name goes with transformers 6.
    new, old = "activation_checkpointing_enable", "gradient_checkpointing_enable"
    getattr(model, new if hasattr(model, new) else old)(settings)
    for layer in layers:
        layer.training = True
        for field, value in vars(layer).items():
            if "dropout" in field and isinstance(value, float):  # a few layers drop by themselves
                setattr(layer, field, 0.0)
    return model


class _Adapter(AbstractContextManager[None]):
    """``base`` with the adapter ``name`` on; afterwards as it was. May be entered again."""

    def __init__(self, base: PreTrainedModel, name: str) -> None:
        self._base, self._name, self._before = base, name, name

    def __enter__(self) -> None:
        self._before = active_name(self._base)
        if self._before != self._name:  # looking through the whole model costs time
            activate(self._base, self._name)

    def __exit__(self, *_: object) -> None:
        if self._before != self._name:
            activate(self._base, self._before)


def _contexts(model: PreTrainedModel) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """What a layer's forward pass stands in, and what its repetition does."""
    return nullcontext(), _Adapter(model, active_name(model))

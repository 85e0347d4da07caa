"""Device and precision with which models are loaded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PreTrainedModel

from rlcore.config import LoraConfig
from rlcore.hardware.precision import cast_linears, set_compute_dtype
from rlcore.models.gradient_checkpointing import enable_gradient_checkpointing
from rlcore.models.loading import load_policy


@dataclass(frozen=True, kw_only=True, slots=True)
class Runtime:
    """Device and precision of a stage.

    Attributes:
        compute_dtype: dtype of the products in backbone and head; trained weights are always float32.
        gradient_checkpointing: See :class:`rlcore.config.HardwareConfig`.
        like_start: Save trained weights in the precision of the starting checkpoint. False if products are float32,
            because the engine would then serve other numbers.
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

        With all weights and states in half precision the outputs would differ by rounding, which the KL penalty would
        train on.
        """
        model = load_policy(folder, device=self.device, dtype=torch.float32)
        return cast_linears(model, self.compute_dtype).requires_grad_(False)

    def of_native_engine(self, adapter: LoraConfig) -> Runtime:
        """Return the runtime of the native engine for a policy with this LoRA: float32.

        The engine's weights are the base's plus the adapter's. In half precision a sum with a small part rounds back to
        the base, and the engine would sample from the start for some steps.
        """
        return replace(self, compute_dtype=torch.float32) if adapter.rank else self

    def load_base(self, folder: Path, *, as_vllm: bool = False) -> PreTrainedModel:
        """Load a frozen base for trained adapters, as :meth:`load_reference`: its states and sums are float32.

        ``as_vllm``: in half precision as vLLM computes, which rounds small additions of an adapter away. A learner with
        float32 sums would differ from it by three times as much (SmolLM2, bfloat16: 0.28 instead of 0.09 of log-odds).
        """
        model = self.load_frozen(folder) if as_vllm else self.load_reference(folder)
        return enable_gradient_checkpointing(model) if self.gradient_checkpointing else model

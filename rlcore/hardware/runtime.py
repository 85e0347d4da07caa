"""In which precision and on which device models are loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from rlcore.hardware.precision import cast_linears, set_compute_dtype
from rlcore.models.gradient_checkpointing import enable_gradient_checkpointing
from rlcore.models.loading import load_policy


@dataclass(frozen=True, kw_only=True, slots=True)
class Runtime:
    """``compute_dtype``: of the matrix products in backbone and head; weights that learn are always float32.
    ``recompute``: see :class:`rlcore.config.HardwareConfig`. ``narrow``: whether what was trained is handed on in the
    starting checkpoint's precision. Where products are float32 it is not: the engine would serve other numbers then."""

    device: torch.device
    compute_dtype: torch.dtype
    recompute: bool = False
    narrow: bool = False

    def load_trainable(self, folder: Path) -> PreTrainedModel:
        """A model with float32 weights: with bfloat16 ones a small learning rate rounds to no update at all."""
        model = set_compute_dtype(load_policy(folder, device=self.device, dtype=torch.float32), self.compute_dtype)
        return enable_gradient_checkpointing(model) if self.recompute else model

    def load_frozen(self, folder: Path) -> PreTrainedModel:
        """A model for inference alone, in the compute precision."""
        model = load_policy(folder, device=self.device, dtype=self.compute_dtype)
        return model.requires_grad_(False)

    def load_reference(self, folder: Path) -> PreTrainedModel:
        """A frozen model whose outputs equal those of a freshly loaded trainable one, bit for bit.

        With all weights and states in half precision it would differ by rounding, and a KL penalty would train on that.
        """
        model = load_policy(folder, device=self.device, dtype=torch.float32)
        return cast_linears(model, self.compute_dtype).requires_grad_(False)

    def load_base(self, folder: Path) -> PreTrainedModel:
        """A frozen base for adapters that learn."""
        model = self.load_frozen(folder)
        return enable_gradient_checkpointing(model) if self.recompute else model

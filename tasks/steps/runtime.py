"""Where and in which precision a stage computes."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from rlcore.config import HardwareConfig
from rlcore.machine import choose_device_and_dtype
from rlcore.models.loading import load_policy
from rlcore.models.precision import compute_in, narrow_linears
from rlcore.models.recompute import recompute_layers
from rlcore.out_of_memory import free_cached


@dataclass(frozen=True, kw_only=True, slots=True)
class Runtime:
    """``compute_dtype``: of the matrix products in trunk and head; weights that learn are always float32.
    ``recompute``: see :class:`rlcore.config.HardwareConfig`. ``narrow``: whether what was trained is handed on in the
    starting checkpoint's precision. Where products are float32 it is not: the engine would serve other numbers then."""

    device: torch.device
    compute_dtype: torch.dtype
    recompute: bool = False
    narrow: bool = False

    def load_trainable(self, folder: Path) -> PreTrainedModel:
        """A model with float32 weights: with bfloat16 ones a small learning rate rounds to no update at all."""
        model = compute_in(load_policy(folder, device=self.device, dtype=torch.float32), self.compute_dtype)
        return recompute_layers(model) if self.recompute else model

    def load_frozen(self, folder: Path) -> PreTrainedModel:
        """A model for inference alone, in the compute precision."""
        model = load_policy(folder, device=self.device, dtype=self.compute_dtype)
        return model.requires_grad_(False)

    def load_reference(self, folder: Path) -> PreTrainedModel:
        """A frozen model whose outputs equal those of a freshly loaded trainable one, bit for bit.

        With all weights and states in half precision it would differ by rounding, and a KL penalty would train on that.
        """
        model = load_policy(folder, device=self.device, dtype=torch.float32)
        return narrow_linears(model, self.compute_dtype).requires_grad_(False)

    def load_base(self, folder: Path) -> PreTrainedModel:
        """A frozen base for adapters that learn."""
        model = self.load_frozen(folder)
        return recompute_layers(model) if self.recompute else model


@contextlib.contextmanager
def open_runtime(config: HardwareConfig, *, seed: int) -> Iterator[Runtime]:
    """Set threads and the global seed (only dropout draws from it); models are loaded in the configured precision.

    What an earlier stage of this process left on the GPU is freed before and, as far as nothing holds it, after.
    """
    free_cached()
    if config.num_threads:
        torch.set_num_threads(config.num_threads)
    torch.manual_seed(seed)
    device, dtype = choose_device_and_dtype(config)
    if device.type == "cuda":
        if device.index is not None:
            torch.cuda.set_device(device)  # what takes no device, such as vLLM's senders, takes this one
        torch.cuda.reset_peak_memory_stats(device)
    try:
        narrow = dtype.itemsize < torch.float32.itemsize and not config.save_float32
        yield Runtime(device=device, compute_dtype=dtype, recompute=config.recompute_layers, narrow=narrow)
    finally:
        free_cached()


def peak_memory_gib(device: torch.device) -> float:
    """Peak memory in GiB: of the GPU's allocator, or resident memory of this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20

"""Device and precision of a stage, and the workload of its engine."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from rlcore.config import EngineConfig, HardwareConfig, LoraConfig
from rlcore.hardware.machine import choose_device_and_dtype
from rlcore.hardware.out_of_memory import empty_cache
from rlcore.models.runtime import Runtime


@contextlib.contextmanager
def open_runtime(config: HardwareConfig, *, seed: int) -> Iterator[Runtime]:
    """Set threads and the global seed, which only dropout uses; models are loaded in the configured precision.

    GPU memory of earlier stages in this process is freed before and, unless it is referenced, after.
    """
    empty_cache()
    if config.num_threads:
        torch.set_num_threads(config.num_threads)
    torch.manual_seed(seed)
    device, dtype = choose_device_and_dtype(config)
    if device.type == "cuda":
        if device.index is not None:
            torch.cuda.set_device(device)  # default device of code that takes none, such as vLLM's senders
        torch.cuda.reset_peak_memory_stats(device)
    try:
        like_start = dtype.itemsize < torch.float32.itemsize and not config.save_float32
        yield Runtime(
            device=device,
            compute_dtype=dtype,
            gradient_checkpointing=config.gradient_checkpointing,
            like_start=like_start,
        )
    finally:
        empty_cache()


def peak_memory_gib(device: torch.device) -> float:
    """Return the peak memory in GiB: of the GPU's allocator, or resident memory of this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Workload of an engine in a stage.

    ``max_tokens``: of the longest prompt and its completion. ``learns``: a learner shares the device, and
    ``learns_meanwhile``, while the engine samples, or ``takes_turns`` with it. ``adapter``: the policy's LoRA on the
    served checkpoint.
    """

    max_concurrent: int
    max_tokens: int
    learns: bool = False
    learns_meanwhile: bool = False
    takes_turns: bool = False
    adapter: LoraConfig = field(default_factory=LoraConfig)


def engine_dtype(config: EngineConfig, runtime: Runtime, adapter: LoraConfig) -> torch.dtype:
    """Return the precision of the engine; ``adapter``: the policy's LoRA on the served checkpoint."""
    if config.kind == "native":
        return runtime.of_native_engine(adapter).compute_dtype
    if config.dtype == "auto":
        return runtime.compute_dtype
    dtype: torch.dtype = getattr(torch, config.dtype)
    return dtype

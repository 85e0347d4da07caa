"""Device and precision of a stage."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator

import torch

from rlcore.config import HardwareConfig
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

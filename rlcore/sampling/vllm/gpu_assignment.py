"""Assignment of GPUs to vLLM servers, with their memory. Decided before any server starts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rlcore.config import EngineConfig
from rlcore.errors import ConfigError
from rlcore.sampling.vllm.process import ALONE

WITH_LEARNER = 0.4  # fraction of a GPU's memory
_OF_FREE = 0.85  # of the free memory on the trainer's GPU: its allocator and CUDA grow a little


@dataclass(frozen=True, kw_only=True, slots=True)
class VisibleGpus:
    """GPUs that are visible to this process.

    Attributes:
        count: Number of GPUs.
        trainer: Index of the trainer's GPU, or None if it computes on a CPU.
        free: Fraction of the trainer's GPU memory that is free now.
        learns: True if a learner is on that GPU, which will use more of it.
    """

    count: int
    trainer: int | None
    free: float = 1.0
    learns: bool = False


def visible_gpus(device: torch.device, *, learns: bool) -> VisibleGpus:
    """Return the visible GPUs. Only the trainer's GPU, ``device``, is queried."""
    count = torch.cuda.device_count()
    if device.type != "cuda":
        return VisibleGpus(count=count, trainer=None)
    index = device.index if device.index is not None else torch.cuda.current_device()
    free, total = torch.cuda.mem_get_info(index)
    return VisibleGpus(count=count, trainer=index, free=free / total, learns=learns)


def assign_gpus(config: EngineConfig, gpus: VisibleGpus) -> list[tuple[int, ...]]:
    """Return the GPUs of each replica; none if no GPU is visible.

    Raises:
        ConfigError: The configuration needs more GPUs than are visible, or names one that is not.
    """
    width = config.gpus.tensor_parallel
    needed = config.replicas * width
    if not gpus.count:
        if config.gpus.devices:
            raise ConfigError(
                "gpus.devices names GPUs, but none is visible", where="engine.gpus.devices", fix="leave it out"
            )
        return [()] * config.replicas
    chosen = list(config.gpus.devices) or _default(needed, gpus, width)
    unknown = [index for index in chosen if index >= gpus.count]
    if unknown:
        raise ConfigError(
            f"gpus.devices names GPU {unknown[0]}, the visible ones are 0 to {gpus.count - 1}",
            where="engine.gpus.devices",
            fix="use indices of the GPUs in CUDA_VISIBLE_DEVICES, from 0",
        )
    assigned = [tuple(chosen[start : start + width]) for start in range(0, needed, width)]
    twice = [each for each in assigned if len(set(each)) < width]
    if twice:
        raise ConfigError(
            f"a replica of tensor_parallel = {width} has GPU {twice[0][0]} twice",
            where="engine.gpus.devices",
            fix="name different GPUs for each replica",
        )
    return assigned


def memory_fractions(config: EngineConfig, assigned: Sequence[Sequence[int]], gpus: VisibleGpus) -> list[float]:
    """Return the fraction of GPU memory that each replica may use.

    Raises:
        ConfigError: Replicas on one GPU need more than all of it, or more than is free on the trainer's.
    """
    sharing = Counter(index for each in assigned for index in each)
    for index, count in sharing.items():
        room = gpus.free if index == gpus.trainer else 1.0
        if count * config.gpus.gpu_memory_utilization > room:
            whose = "the trainer's GPU, of which" if index == gpus.trainer else f"GPU {index}, of which"
            raise ConfigError(
                f"{count} replicas want {count * config.gpus.gpu_memory_utilization:.2f} of {whose} {room:.2f} is free",
                where="engine.gpus.gpu_memory_utilization",
                fix="lower gpus.gpu_memory_utilization (0: automatic), name more gpus.devices, or use fewer replicas",
            )
    if config.gpus.gpu_memory_utilization:
        return [config.gpus.gpu_memory_utilization] * len(assigned)
    return [min((_memory_fraction(index, gpus) / sharing[index] for index in each), default=ALONE) for each in assigned]


def _default(needed: int, gpus: VisibleGpus, width: int) -> list[int]:
    """Return the GPUs without the trainer's, in order. A single GPU is shared by all."""
    if gpus.count == 1 and width == 1:
        return [0] * needed
    others = [index for index in range(gpus.count) if index != gpus.trainer]
    if needed > len(others):
        besides = "" if gpus.trainer is None else f" besides the trainer's (GPU {gpus.trainer})"
        raise ConfigError(
            f"{needed // width} replicas of {width} GPUs need {needed}, {len(others)} are visible{besides}",
            where="engine.replicas",
            fix="use fewer replicas or a smaller tensor_parallel; gpus.devices may name a GPU twice, or the trainer's",
        )
    return others[:needed]


def _memory_fraction(index: int, gpus: VisibleGpus) -> float:
    if index != gpus.trainer:
        return ALONE
    return min(_OF_FREE * gpus.free, WITH_LEARNER if gpus.learns else ALONE)

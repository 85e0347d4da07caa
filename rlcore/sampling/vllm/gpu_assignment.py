"""Assignment of GPUs to vLLM servers, with their memory and weight transport. Decided before any server starts."""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rlcore.config import EngineConfig, TransferKind
from rlcore.errors import ConfigError
from rlcore.sampling.vllm.process import ALONE
from rlcore.sampling.vllm.weights import DIRECT, fits_in_memory

WITH_LEARNER = 0.4  # fraction of a GPU's memory
_OF_FREE = 0.85  # of the free memory on the trainer's GPU: its allocator and CUDA grow a little


@dataclass(frozen=True, kw_only=True, slots=True)
class VisibleGpus:
    """GPUs that are visible to this process.

    Attributes:
        trainer: Index of the trainer's GPU; None on a CPU.
        free: Fraction of the trainer's GPU memory that is free now.
        learns: True if a learner will use more of that GPU.
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


def shares_trainer_gpu(assigned: Sequence[Sequence[int]], gpus: VisibleGpus) -> list[bool]:
    """Return, for each replica, True if it uses the trainer's GPU."""
    return [gpus.trainer in each for each in assigned]


def is_installed() -> bool:
    """Return True if this environment has vLLM."""
    return importlib.util.find_spec("vllm") is not None


def choose_transfer(
    config: EngineConfig, device: torch.device, *, num_bytes: int, shares: Sequence[bool], can_send: bool
) -> TransferKind:
    """Return the transport of the weights; ``auto`` resolves to one.

    Args:
        shares: As of :func:`shares_trainer_gpu`.
        can_send: True if vLLM is installed here and can send from GPU to GPU.

    Raises:
        ConfigError: The named transport needs GPUs or memory that are not available.
    """
    fits, name = fits_in_memory(num_bytes), config.weight_transfer
    if name == "auto":
        if config.urls or config.weight_dir:
            return "file"
        if device.type == "cuda" and can_send and not any(shares):
            return "nccl"
        return "shared_memory" if fits else "file"
    if name in DIRECT:
        _check_direct(name, device, shares=shares, can_send=can_send)
    if name == "shared_memory" and not fits:
        raise ConfigError(
            f"/dev/shm has no room for three times {num_bytes / 2**20:.0f} MiB",
            where="engine.weight_transfer",
            fix='set engine.weight_transfer = "gloo", or "file" with a folder as engine.weight_dir',
        )
    return name


def _check_direct(name: TransferKind, device: torch.device, *, shares: Sequence[bool], can_send: bool) -> None:
    if device.type != "cuda":
        raise ConfigError(
            f"{name} sends weights from GPU to GPU, but this run trains on {device.type}",
            where="engine.weight_transfer",
            fix="use shared_memory on one machine, gloo between two, or auto",
        )
    if not can_send:
        raise ConfigError(
            f"{name} needs vLLM in the trainer's environment too, but it is not installed",
            where="engine.weight_transfer",
            fix="use shared_memory or gloo, or install vllm in this environment",
        )
    if name == "nccl" and any(shares):
        raise ConfigError(
            f"nccl cannot join two processes on one GPU, but replica {list(shares).index(True)} uses the trainer's",
            where="engine.weight_transfer",
            fix="use ipc, which is for one GPU, or name other GPUs in engine.gpus.devices",
        )
    if name == "ipc" and not all(shares):
        raise ConfigError(
            f"ipc shares memory of one GPU, but replica {list(shares).index(False)} does not use the trainer's",
            where="engine.weight_transfer",
            fix="use nccl, or name the trainer's GPU in engine.gpus.devices",
        )


def _default(needed: int, gpus: VisibleGpus, width: int) -> list[int]:
    """Return the GPUs without the trainer's; a single GPU is shared by all."""
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
    """Return the fraction of a GPU's memory for all its replicas."""
    if index != gpus.trainer:
        return ALONE
    return min(_OF_FREE * gpus.free, WITH_LEARNER if gpus.learns else ALONE)

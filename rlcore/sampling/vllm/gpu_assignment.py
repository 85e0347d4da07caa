"""Which GPUs vLLM servers use, how much of their memory, and how weights reach them. Decided before any starts."""

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

BESIDE_LEARNER = 0.4  # of a GPU's memory
_OF_FREE = 0.85  # what is free on the trainer's GPU is not all taken: its allocator and CUDA itself grow a little


@dataclass(frozen=True, kw_only=True, slots=True)
class VisibleGpus:
    """The GPUs that this process sees: how many there are, and which is the trainer's (None: it computes on a CPU).

    ``free``: the share of the trainer's memory that is free now. ``learns``: a learner is on that GPU, and will want
    more of it.
    """

    count: int
    trainer: int | None
    free: float = 1.0
    learns: bool = False


def visible_cards(device: torch.device, *, learns: bool) -> VisibleGpus:
    """The GPUs beside a trainer on ``device``; only the trainer's own is touched."""
    count = torch.cuda.device_count()
    if device.type != "cuda":
        return VisibleGpus(count=count, trainer=None)
    index = device.index if device.index is not None else torch.cuda.current_device()
    free, total = torch.cuda.mem_get_info(index)
    return VisibleGpus(count=count, trainer=index, free=free / total, learns=learns)


def assign_gpus(config: EngineConfig, cards: VisibleGpus) -> list[tuple[int, ...]]:
    """The GPUs of each replica; none for any where there is no GPU.

    Raises:
        ConfigError: the configuration asks for more GPUs than there are, or names one that is not there.
    """
    width = config.gpus.tensor_parallel
    needed = config.replicas * width
    if not cards.count:
        if config.gpus.devices:
            raise ConfigError(
                "gpus.devices names GPUs, none is visible here", where="engine.gpus.devices", fix="leave it out"
            )
        return [()] * config.replicas
    chosen = list(config.gpus.devices) or _default(needed, cards, width)
    unknown = [index for index in chosen if index >= cards.count]
    if unknown:
        raise ConfigError(
            f"gpus.devices names GPU {unknown[0]}, the visible ones are 0 to {cards.count - 1}",
            where="engine.gpus.devices",
            fix="count from 0 among those that CUDA_VISIBLE_DEVICES leaves",
        )
    dealt = [tuple(chosen[start : start + width]) for start in range(0, needed, width)]
    twice = [each for each in dealt if len(set(each)) < width]
    if twice:
        raise ConfigError(
            f"a replica of tensor_parallel = {width} is given GPU {twice[0][0]} twice",
            where="engine.gpus.devices",
            fix="name different GPUs for the parts of one replica",
        )
    return dealt


def memory_fractions(config: EngineConfig, dealt: Sequence[Sequence[int]], cards: VisibleGpus) -> list[float]:
    """The share of its GPUs' memory that each replica may take.

    Raises:
        ConfigError: replicas on one GPU want more than all of it, or more of the trainer's than is free.
    """
    sharing = Counter(index for each in dealt for index in each)
    for index, count in sharing.items():
        room = cards.free if index == cards.trainer else 1.0
        if count * config.gpus.gpu_memory_utilization > room:
            whose = "the trainer's GPU, of which" if index == cards.trainer else f"GPU {index}, of which"
            raise ConfigError(
                f"{count} replicas want {count * config.gpus.gpu_memory_utilization:.2f} of {whose} {room:.2f} is free",
                where="engine.gpus.gpu_memory_utilization",
                fix="lower memory_fraction (0 chooses), name more in gpus.devices, or take fewer replicas",
            )
    if config.gpus.gpu_memory_utilization:
        return [config.gpus.gpu_memory_utilization] * len(dealt)
    return [min((_share(index, cards) / sharing[index] for index in each), default=ALONE) for each in dealt]


def shares_trainer_gpu(dealt: Sequence[Sequence[int]], cards: VisibleGpus) -> list[bool]:
    """For each replica, whether it computes on the trainer's GPU."""
    return [cards.trainer in each for each in dealt]


def is_installed() -> bool:
    """Whether this environment has vLLM."""
    return importlib.util.find_spec("vllm") is not None


def choose_transfer(
    config: EngineConfig, device: torch.device, *, num_bytes: int, shares: Sequence[bool], can_send: bool
) -> TransferKind:
    """The transport of the weights: the one that was named, or what ``auto`` means here.

    ``num_bytes``: the size of the weights. ``shares``: for each server of ours, whether it computes on the trainer's
    GPU. ``can_send``: vLLM is installed in this environment, and its senders bring weights from GPU to GPU.

    Raises:
        ConfigError: the named transport needs GPUs that are not there, or more memory than there is.
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
            fix="take gloo, or file with a folder as engine.weight_dir",
        )
    return name


def _check_direct(name: TransferKind, device: torch.device, *, shares: Sequence[bool], can_send: bool) -> None:
    if device.type != "cuda":
        raise ConfigError(
            f"{name} sends weights from GPU to GPU, this run trains on {device.type}",
            where="engine.weight_transfer",
            fix="take shared_memory on one machine, gloo between two; auto chooses",
        )
    if not can_send:
        raise ConfigError(
            f"{name} needs vLLM in the trainer's environment too, and it is not there",
            where="engine.weight_transfer",
            fix="take shared_memory or gloo, or install vllm beside the library",
        )
    if name == "nccl" and any(shares):
        raise ConfigError(
            f"nccl cannot join two processes on one GPU, and replica {list(shares).index(True)} computes on the "
            "trainer's",
            where="engine.weight_transfer",
            fix="take ipc, which is for one GPU, or name other GPUs in engine.gpus.devices",
        )
    if name == "ipc" and not all(shares):
        raise ConfigError(
            f"ipc hands over memory of one GPU, and replica {list(shares).index(False)} computes on another than the "
            "trainer's",
            where="engine.weight_transfer",
            fix="take nccl, or name the trainer's GPU in engine.gpus.devices",
        )


def _default(needed: int, cards: VisibleGpus, width: int) -> list[int]:
    """The GPUs beside the trainer's, in order; if there is only one, all share it."""
    if cards.count == 1 and width == 1:
        return [0] * needed
    others = [index for index in range(cards.count) if index != cards.trainer]
    if needed > len(others):
        beside = "" if cards.trainer is None else f" beside the trainer's (GPU {cards.trainer})"
        raise ConfigError(
            f"{needed // width} replicas of {width} GPUs need {needed}, {len(others)} are visible{beside}",
            where="engine.replicas",
            fix="take fewer replicas or a smaller tensor_parallel; gpus.devices may name a GPU twice, or the trainer's",
        )
    return others[:needed]


def _share(index: int, cards: VisibleGpus) -> float:
    """The share of a GPU's memory that all replicas on it may take together."""
    if index != cards.trainer:
        return ALONE
    return min(_OF_FREE * cards.free, BESIDE_LEARNER if cards.learns else ALONE)

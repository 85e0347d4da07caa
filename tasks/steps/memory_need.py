"""Memory that a training stage and its engine need on the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TypeVar

from rlcore.config import (
    DistributedConfig,
    DpoConfig,
    EngineConfig,
    RewardModelConfig,
    SftConfig,
    UpdateConfig,
)
from rlcore.hardware.memory import Footprint, positions_on
from rlcore.hardware.memory_plan import ModelSize, format_bytes
from rlcore.tasks.presets.run import RunConfig

_IN_SHARDS = ("weights", "gradients", "optimizer")
OFFLOAD = "distributed.backend = 'processes' with distributed.cpu_offload = true"


Passes = TypeVar("Passes", SftConfig, DpoConfig, RewardModelConfig, UpdateConfig)


@dataclass(frozen=True, kw_only=True)
class Device:
    """Device of a run: ``cpu`` or ``cuda``, its index, the bytes of a number in products, and its memory.

    ``total``: all bytes of a GPU, the free ones of a CPU; None if unknown. ``gains_packed``: as
    :func:`rlcore.hardware.precision.gains_packed` finds it.
    """

    type: str
    index: int = 0
    compute_bytes: int
    total: int | None
    gains_packed: bool = False


def per_pass(settings: Passes, device: Device) -> Passes:
    """Return settings with the tokens that a pass has on this device."""
    return replace(settings, tokens_per_microbatch=positions_on(device.type, settings.tokens_per_microbatch))


@dataclass(frozen=True, kw_only=True)
class Need:
    """Memory that a stage needs on the device. ``engine``: bytes that vLLM servers take there while they are awake.

    ``sleeps``: True if they release them during an update. ``fixes``: settings that reduce the fixed part.
    """

    stage: str
    footprint: Footprint
    engine: int
    fixes: tuple[str, ...]
    sleeps: bool = False

    @property
    def held(self) -> int:
        """Bytes that do not depend on the micro-batches; exact. An update frees its gradients at its end."""
        found, resting = self.footprint, 0 if self.sleeps else self.engine
        return found.weights + found.optimizer + max(found.gradients + resting, self.engine)

    @property
    def peak(self) -> int:
        """Bytes of an update or of sampling, whichever needs more; an estimate."""
        found, resting = self.footprint, 0 if self.sleeps else self.engine
        update, sampling = found.gradients + found.activations + resting, found.kv_cache + found.packed + self.engine
        return found.weights + found.optimizer + max(update, sampling)

    def __str__(self) -> str:
        parts = {
            "weights": self.footprint.weights,
            "gradients": self.footprint.gradients,
            "moments": self.footprint.optimizer,
            "activations": self.footprint.activations,
            "cache": self.footprint.kv_cache,
            "packed weights": self.footprint.packed,
            "engine": self.engine,
        }
        named = ", ".join(f"{name} {format_bytes(value)}" for name, value in parts.items() if value)
        return f"{self.stage} needs {format_bytes(self.peak)} ({named})"


def supervised_need(
    name: str,
    config: RunConfig,
    size: ModelSize,
    device: Device,
    *,
    footprint: Callable[..., Footprint],
    adapter: str = "",
) -> Need:
    """Return the memory of a supervised stage for a model of this size.

    ``footprint``: the function of :mod:`rlcore.hardware.memory_plan`. ``adapter``: the key of its LoRA rank.
    """
    own = config.stages[name].settings
    rank = attrgetter(adapter)(own) if adapter else 0
    found = footprint(
        size,
        per_pass(own, device),
        compute_bytes=device.compute_bytes,
        gradient_checkpointing=config.hardware.gradient_checkpointing,
    )
    lowers = {
        f"stages.{name}.{adapter} = 16": bool(adapter) and not rank,
        f"stages.{name}.optim.kind = 'adamw_8bit'": own.optim.kind == "adamw",
        OFFLOAD: not rank and not config.distributed.cpu_offload,
    }
    on_rank = of_a_rank(found, config.distributed, device, is_adapted=rank > 0)
    return Need(stage=name, footprint=on_rank, engine=0, fixes=true_of(lowers))


def of_a_rank(found: Footprint, placement: DistributedConfig, device: Device, *, is_adapted: bool) -> Footprint:
    """Return the footprint on a rank's device: its part of the shards, or none of them if they are offloaded.

    Copies for an engine or a reward model are whole, but counted as shards: the estimate rejects nothing that would
    fit.
    """
    if not placement.is_sharded(adapted=is_adapted):
        return found
    parts = 0 if placement.cpu_offload and device.type != "cpu" else 1
    shares = {part: parts * getattr(found, part) // placement.learner_ranks for part in _IN_SHARDS}
    return replace(found, **shares)


def engine_bytes(engine: EngineConfig, size: ModelSize, device: Device) -> int:
    """Return the bytes of vLLM servers on the trainer's device.

    Raises:
        ConfigError: the servers' GPUs do not exist, or ``engine.weight_transfer`` cannot reach them.
    """
    if engine.kind != "vllm":
        return 0
    import torch

    from rlcore.sampling.vllm.gpu_assignment import VisibleGpus, is_installed
    from rlcore.tasks.steps.vllm_engine import place

    is_cuda, count = device.type == "cuda", torch.cuda.device_count()
    cards = VisibleGpus(count=max(int(is_cuda), count), trainer=device.index if is_cuda else None, learns=True)
    weights = size.num_parameters * (4 if engine.dtype == "float32" else 2)
    placed = place(engine, cards, torch.device(device.type), num_bytes=weights, can_send=is_installed())
    total = (device.total or 0) if is_cuda else 0
    with_cache = int(engine.kv_cache_gib * 2**30) + weights if engine.kv_cache_gib else 0
    here = [part for part, shared in zip(placed.fractions, placed.shares, strict=False) if shared]  # none of urls
    return sum(with_cache or int(part * total) for part in here)


def true_of(flags: Mapping[str, bool]) -> tuple[str, ...]:
    """Return the names whose flag is True."""
    return tuple(name for name, flag in flags.items() if flag)

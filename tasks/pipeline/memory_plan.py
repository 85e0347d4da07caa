"""The memory plan of a run: what each stage needs beside what the device has, before anything is loaded."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from rlcore.algorithms.resolve import resolve_algorithm
from rlcore.config import EngineConfig, PlacementConfig
from rlcore.errors import ConfigError
from rlcore.hardware.free_memory import total_bytes
from rlcore.hardware.machine import choose_device_and_dtype
from rlcore.hardware.memory import Footprint
from rlcore.hardware.memory_plan import ModelSize, dpo_needs, readable, reward_model_needs, rl_needs, sft_needs
from rlcore.models.model_validation import read_config, require_files
from rlcore.models.scratch import make_config, make_tokenizer
from rlcore.sampling.vllm.gpu_assignment import Cards, is_installed
from rlcore.tasks.presets.run import RunConfig
from rlcore.tasks.presets.stages import DpoStage, RewardModelStage, RlStage, SftStage
from rlcore.tasks.steps.base import MODEL
from rlcore.tasks.steps.rollout_engine import place
from rlcore.tasks.store.artifacts import ArtifactRef
from rlcore.tasks.store.settings import Home

_IN_SHARDS = ("weights", "gradients", "optimizer")
_OFFLOAD = "placement.backend = 'processes' with placement.offload = true"


@dataclass(frozen=True, kw_only=True)
class Need:
    """What a stage needs of the device. ``engine``: bytes that a vLLM server takes there for itself.

    ``fixes``: settings that lower what is held all the time.
    """

    stage: str
    footprint: Footprint
    engine: int
    fixes: tuple[str, ...]

    @property
    def held(self) -> int:
        """Bytes that do not depend on the micro-batches; exact."""
        return self.footprint.weights + self.footprint.gradients + self.footprint.optimizer + self.engine

    @property
    def peak(self) -> int:
        """The fixed bytes plus the larger of activations and the engine's cache, which take turns; an estimate."""
        return self.held + max(self.footprint.activations, self.footprint.kv_cache)

    def __str__(self) -> str:
        parts = {
            "weights": self.footprint.weights,
            "gradients": self.footprint.gradients,
            "moments": self.footprint.optimizer,
            "activations": self.footprint.activations,
            "cache": self.footprint.kv_cache,
            "engine": self.engine,
        }
        named = ", ".join(f"{name} {readable(value)}" for name, value in parts.items() if value)
        return f"{self.stage} needs about {readable(self.peak)} ({named})"


def needs_of(config: RunConfig, model: PretrainedConfig, stages: Collection[str]) -> tuple[Need, ...]:
    """The memory that each training stage among ``stages`` needs, for the starting checkpoint's configuration."""
    size = ModelSize.of(model)
    device, dtype = choose_device_and_dtype(config.hardware)
    given: dict[str, Any] = {"compute_bytes": dtype.itemsize, "recompute": config.hardware.recompute_layers}
    needs = []
    for name, stage in config.stages.items():
        if name not in stages:
            continue
        if isinstance(stage, SftStage):
            found, adapter = sft_needs(size, stage.settings, **given), None
        elif isinstance(stage, DpoStage):
            found, adapter = dpo_needs(size, stage.settings, **given), ("adapter.rank", stage.settings.adapter)
        elif isinstance(stage, RewardModelStage):
            found = reward_model_needs(size, stage.settings, **given)
            adapter = ("trunk.adapter.rank", stage.settings.trunk.adapter)
        else:
            needs += [_rl_need(name, stage, config, size, device, dtype)] if isinstance(stage, RlStage) else []
            continue
        is_adapted = adapter is not None and adapter[1].rank > 0
        lowers = {
            f"stages.{name}.{adapter[0] if adapter else ''} = 16": adapter is not None and not is_adapted,
            f"stages.{name}.optim.kind = 'adamw_8bit'": stage.settings.optim.kind == "adamw",
            _OFFLOAD: not is_adapted and not config.placement.offload,
        }
        footprint = _of_a_rank(found, config.placement, device, is_adapted=is_adapted)
        needs.append(Need(stage=name, footprint=footprint, engine=0, fixes=_true(lowers)))
    return tuple(needs)


def model_of(config: RunConfig, home: Home, refs: Mapping[str, ArtifactRef]) -> PretrainedConfig | None:
    """The starting checkpoint's configuration; None where it is yet to be fetched."""
    if "import_sft" in refs:
        return _read(home.root / refs["import_sft"].uri / MODEL)
    if config.model.source == "scratch":
        shape = config.model.shape
        return make_config(shape, make_tokenizer(max_positions=shape.max_positions))
    if config.model.source == "folder" and (Path(config.model.path) / "config.json").is_file():
        return _read(Path(config.model.path))
    return None


def _read(folder: Path) -> PretrainedConfig:
    require_files(folder)
    return read_config(folder, local_files_only=True)


def memory_lines(config: RunConfig, home: Home, refs: Mapping[str, ArtifactRef], stages: Collection[str]) -> list[str]:
    """The plan for people: a line for each of ``stages`` that trains.

    Raises:
        ConfigError: one of them cannot fit on the GPU.
    """
    model = model_of(config, home, refs)
    if model is None:
        return ["memory: known when the model is there, after import_sft"]
    device, _ = choose_device_and_dtype(config.hardware)
    return checked(needs_of(config, model, stages), total_bytes(device), is_cuda=device.type == "cuda")


def checked(needs: Sequence[Need], total: int | None, *, is_cuda: bool) -> list[str]:
    """Each need beside what the device has; ``total`` is None where that is not known.

    Raises:
        ConfigError: a stage cannot fit on the GPU. On a CPU what is free changes, and a line says that it may not fit.
    """
    if total is None:
        return [f"memory: {need}; what the device has is not known" for need in needs]
    has = f"the card has {readable(total)}" if is_cuda else f"{readable(total)} are free"
    too_large = [need for need in needs if need.held > total]
    if too_large and is_cuda:
        raise ConfigError(
            "; ".join(f"{need}, {has}" for need in too_large),
            where="memory",
            fix="set " + " or ".join(dict.fromkeys(fix for need in too_large for fix in need.fixes)),
        )
    return [f"memory: {need}, {has}{_advice(need, total)}" for need in needs]


def _advice(need: Need, total: int) -> str:
    if need.peak <= total:
        return ""
    settings = ("hardware.recompute_layers = true", "a smaller tokens_per_microbatch")
    return f": this may not fit; set {' or '.join(need.fixes if need.held > total else settings)}"


def _rl_need(
    name: str, stage: RlStage, config: RunConfig, size: ModelSize, device: torch.device, dtype: torch.dtype
) -> Need:
    rl, path = stage.settings, f"stages.{name}"
    uses_critic = resolve_algorithm(rl).uses_critic
    models = [config.stages[term.stage].settings for term in rl.rewards if term.kind == "reward_model"]
    used = config.engine_of(rl.sampling)
    footprint = rl_needs(
        size,
        replace(rl, sampling=replace(rl.sampling, engine=used)),
        uses_critic=uses_critic,
        reward_model=models[0] if models else None,  # of several, whose shapes are alike, one is counted
        compute_bytes=dtype.itemsize,
        recompute=config.hardware.recompute_layers,
        num_tokens=max(config.data[each].max_tokens for each in stage.prompts) + rl.sampling.max_new_tokens,
        own_reference=bool(stage.reference),
    )
    footprint = _of_a_rank(footprint, config.placement, device, is_adapted=rl.update.adapter.rank > 0)
    engine = _engine_bytes(used, size, device)
    lowers = {
        f"{path}.update.adapter.rank = 16": not rl.update.adapter.rank,
        f"{path}.update.optim.kind = 'adamw_8bit'": rl.update.optim.kind == "adamw",
        f"{path}.critic.placement = 'head'": uses_critic and rl.critic.placement == "trunk",
        f"{path}.kl.coefficient = 0.0": rl.kl.coefficient > 0.0 and not rl.update.adapter.rank,
        "engine.gpus.memory_fraction": engine > 0,
        _OFFLOAD: not rl.update.adapter.rank and not config.placement.offload,
    }
    return Need(stage=name, footprint=footprint, engine=engine, fixes=_true(lowers))


def _of_a_rank(found: Footprint, placement: PlacementConfig, device: torch.device, *, is_adapted: bool) -> Footprint:
    """What a rank's device holds of it: its part of what is in shards, and nothing of them where they rest elsewhere.

    An engine's or a reward model's copy is whole: too few bytes here, so that nothing is refused that would fit.
    """
    if not placement.is_sharded(adapted=is_adapted):
        return found
    parts = 0 if placement.offload and device.type != "cpu" else 1
    shares = {part: parts * getattr(found, part) // placement.learner_ranks for part in _IN_SHARDS}
    return replace(found, **shares)


def _engine_bytes(engine: EngineConfig, size: ModelSize, device: torch.device) -> int:
    """Bytes that vLLM servers take on the trainer's device; 0 for vLLM in this process, which sleeps during updates.

    Raises:
        ConfigError: the servers' GPUs do not exist, or ``engine.transfer`` cannot bring weights to them.
    """
    if engine.kind != "vllm":
        return 0
    is_cuda, count = device.type == "cuda", torch.cuda.device_count()
    cards = Cards(count=max(int(is_cuda), count), trainer=device.index or 0 if is_cuda else None, learns=True)
    weights = size.num_parameters * (4 if engine.dtype == "float32" else 2)
    placed = place(engine, cards, device, num_bytes=weights, can_send=is_installed())
    total = (total_bytes(device) or 0) if is_cuda else 0
    with_cache = int(engine.kv_cache_gib * 2**30) + weights if engine.kv_cache_gib else 0
    here = [part for part, shared in zip(placed.fractions, placed.shares, strict=False) if shared]  # none of urls
    return sum(with_cache or int(part * total) for part in here)


def _true(flags: Mapping[str, bool]) -> tuple[str, ...]:
    return tuple(name for name, flag in flags.items() if flag)

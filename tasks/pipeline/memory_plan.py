"""Memory plan of a run: need of each stage and memory of the device, before anything is loaded."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from transformers import PretrainedConfig

from rlcore.errors import ConfigError
from rlcore.hardware.free_memory import total_bytes
from rlcore.hardware.machine import choose_device_and_dtype
from rlcore.hardware.memory_plan import ModelSize, format_bytes
from rlcore.models.model_validation import read_config, require_files
from rlcore.models.preview import preview_config
from rlcore.tasks.kinds import load
from rlcore.tasks.kinds.kind import kind_of
from rlcore.tasks.presets.run import RunConfig
from rlcore.tasks.steps.base import MODEL
from rlcore.tasks.steps.memory_need import Need
from rlcore.tasks.store.artifacts import ArtifactRef
from rlcore.tasks.store.settings import Home

_IN_SHARDS = ("weights", "gradients", "optimizer")
_OFFLOAD = "distributed.backend = 'processes' with distributed.cpu_offload = true"


def needs_of(config: RunConfig, model: PretrainedConfig, stages: Collection[str]) -> tuple[Need, ...]:
    """Return the memory that each training stage among ``stages`` needs with this model configuration."""
    size = ModelSize.of(model)
    asked = [(name, kind_of(stage.kind).memory) for name, stage in config.stages.items() if name in stages]
    return tuple(load(memory)(name, config, size) for name, memory in asked if memory)


def model_of(config: RunConfig, home: Home, refs: Mapping[str, ArtifactRef]) -> PretrainedConfig | None:
    """Return the base's configuration; None if it must still be fetched."""
    if "import_sft" in refs:
        return _read(home.root / refs["import_sft"].uri / MODEL)
    return preview_config(config.model)


def _read(folder: Path) -> PretrainedConfig:
    require_files(folder)
    return read_config(folder, local_files_only=True)


def memory_lines(config: RunConfig, home: Home, refs: Mapping[str, ArtifactRef], stages: Collection[str]) -> list[str]:
    """Return a line for each of ``stages`` that trains.

    Raises:
        ConfigError: a stage cannot fit on the GPU.
    """
    model = model_of(config, home, refs)
    if model is None:
        return ["memory: known when the model is there, after import_sft"]
    device, _ = choose_device_and_dtype(config.hardware)
    return checked(needs_of(config, model, stages), total_bytes(device), is_cuda=device.type == "cuda")


def checked(needs: Sequence[Need], total: int | None, *, is_cuda: bool) -> list[str]:
    """Compare each need with the device's memory; ``total`` is None if it is unknown.

    Raises:
        ConfigError: a stage cannot fit on the GPU. On a CPU, free memory changes, so a line warns instead.
    """
    if total is None:
        return [f"memory: {need}; memory of the device is unknown" for need in needs]
    has = f"of {format_bytes(total)} {'on the GPU' if is_cuda else 'free'}"
    too_large = [need for need in needs if need.held > total]
    if too_large and is_cuda:
        raise ConfigError(
            "; ".join(f"{need} {has}" for need in too_large),
            where="memory",
            fix="set " + " or ".join(dict.fromkeys(fix for need in too_large for fix in need.fixes)),
        )
    return [f"memory: {need} {has}{_advice(need, total)}" for need in needs]


def _advice(need: Need, total: int) -> str:
    if need.peak <= total:
        return ""
    settings = need.fixes
    if need.held <= total and need.footprint.kv_cache > need.footprint.activations:
        settings = (f"a smaller stages.{need.stage}.sampling.max_concurrent",)
    elif need.held <= total:
        settings = ("hardware.gradient_checkpointing = true", "a smaller tokens_per_microbatch")
    return f": this may not fit; set {' or '.join(settings)}"

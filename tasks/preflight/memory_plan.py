"""Memory plan of a run: need of each stage and memory of the device, before anything is loaded."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rlcore.config import HardwareConfig
from rlcore.errors import ConfigError
from rlcore.hardware.memory import free_on_machine
from rlcore.hardware.memory_plan import ModelSize, format_bytes
from rlcore.tasks.keys.machine import known_machine
from rlcore.tasks.kinds.kind import kind_of
from rlcore.tasks.presets.run import RunConfig
from rlcore.tasks.steps.memory_need import Device, Need

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def needs_of(config: RunConfig, size: ModelSize, device: Device, stages: Collection[str]) -> tuple[Need, ...]:
    """Return the memory that each training stage among ``stages`` needs on a device."""
    asked = [(name, kind_of(stage.kind).memory) for name, stage in config.stages.items() if name in stages]
    return tuple(memory(name, config, size, device) for name, memory in asked if memory)


def device_of(hardware: HardwareConfig) -> Device:
    """Return the device on which this process would compute.

    Raises:
        ConfigError: the configured GPU does not exist.
    """
    machine = known_machine(hardware)
    return Device(
        type=machine.facts["device"],
        index=int(hardware.device.partition(":")[2] or 0),
        compute_bytes=_BYTES[machine.facts["precision"]],
        total=machine.gpu_bytes or free_on_machine(),
        gains_packed=machine.gains_packed,
    )


def memory_lines(config: RunConfig, size: ModelSize | None, stages: Collection[str]) -> list[str]:
    """Return a line for each of ``stages`` that trains; ``size``: of the base, None if it must still be fetched.

    Raises:
        ConfigError: a stage cannot fit on the GPU.
    """
    if size is None:
        return ["memory: known when the model is there, after import_sft"]
    device = device_of(config.hardware)
    return checked(needs_of(config, size, device, stages), device.total, is_cuda=device.type == "cuda")


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

"""Size checks before a run: memory of each stage, texts against the model's positions, files against the free disk."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from rlcore.config import HardwareConfig, RlConfig
from rlcore.errors import ConfigError, StorageError
from rlcore.hardware.memory import free_on_machine
from rlcore.hardware.memory_plan import ModelSize, format_bytes
from rlcore.tasks.keys.machine import known_machine
from rlcore.tasks.kinds.kind import kind_of
from rlcore.tasks.presets.graph import data_of, evaluated_data, rl_of, sampling_of
from rlcore.tasks.presets.run import RunConfig
from rlcore.tasks.steps.algorithm_facts import uses_critic
from rlcore.tasks.steps.memory_need import Device, Need
from rlcore.tasks.store.settings import unwritable
from rlcore.tasks.store.storage import existing_parent

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_COPIES = 2  # copies of each checkpoint: the artifact and the registered model
_CHECKPOINTS = 3  # of a running RL stage: the newest two, and one being written
_LEARNER_BYTES = 12  # bytes per weight in those: float32 and Adam's two moments
_WEIGHT_BYTES = 4  # bytes per saved weight, at most
_ROLLOUT_BYTES = 24  # bytes per token in a table: id, log-probability, mask, text


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


def position_errors(
    config: RunConfig,
    positions: int | None,
    stages: Collection[str],
    data: Collection[str],
    *,
    is_evaluated: bool,
) -> Iterator[str]:
    """Yield the settings that allow a row and its completion to exceed the model's positions, if these are known."""
    evaluated = config.evaluation.max_new_tokens if is_evaluated else 0
    yield from _agent_errors(config, positions or sys.maxsize, stages, evaluated)
    if positions is None:
        return
    for name in data:
        if config.data[name].max_tokens > positions:
            yield f"data.{name}.max_tokens = {config.data[name].max_tokens}: the model reads {positions}; lower it"
    asked = [
        (f"stages.{name}.sampling.max_new_tokens", sampling.max_new_tokens, data_of(config.stages[name]))
        for name in stages
        if (sampling := sampling_of(config.stages[name]))
    ]
    if is_evaluated:
        asked.append(("evaluation.max_new_tokens", config.evaluation.max_new_tokens, evaluated_data(config)))
    for key, room, names in asked:
        longest = max((config.data[name].max_tokens for name in names if name in data), default=0)
        if longest and longest + room > positions:
            of_data = next(name for name in names if name in data and config.data[name].max_tokens == longest)
            yield (
                f"{key} = {room}: with a prompt of data.{of_data}.max_tokens = {longest} that is {longest + room} "
                f"tokens, and the model reads {positions}; lower one of the two"
            )


def _agent_errors(config: RunConfig, positions: int, stages: Collection[str], evaluated: int) -> Iterator[str]:
    for name in stages:
        stage = config.stages[name]
        if not (sampling := sampling_of(stage)) or not sampling.agent:
            continue
        room = sampling.agent.max_prompt_tokens
        key = f"stages.{name}.sampling.agent.max_prompt_tokens = {room}"
        longest = max((config.data[each].max_tokens for each in data_of(stage) if each in config.data), default=0)
        new = max(sampling.max_new_tokens, evaluated)
        if longest > room:
            yield f"{key}: a prompt of the data may have max_tokens = {longest}; raise it"
        elif room + new > positions:
            yield f"{key}: with {new} new tokens that is {room + new}, and the model reads {positions}; lower it"


def disk_need(config: RunConfig, size: ModelSize, stages: Collection[str]) -> int:
    """Estimate the bytes that a run writes: checkpoints with copies, those that RL keeps, and all rollouts."""
    parameters = size.num_parameters
    own = [config.stages[name] for name in stages]
    made: int = 1 + sum(stage.produces in ("checkpoint", "reward_model") for stage in own)
    rl = [found for stage in own if (found := rl_of(stage))]
    working = sum(_working(each, parameters) for each in rl)
    tokens = sum(r.num_iterations * r.prompts_per_iteration * r.group_size * r.sampling.max_new_tokens for r in rl)
    return made * _COPIES * _WEIGHT_BYTES * parameters + working + _ROLLOUT_BYTES * tokens


def _working(rl: RlConfig, parameters: int) -> int:
    if rl.update.lora.rank:
        return 0
    has_backbone = uses_critic(rl) and rl.critic.architecture == "separate"
    return _CHECKPOINTS * _LEARNER_BYTES * parameters * (1 + has_backbone)


def disk_summary(config: RunConfig, size: ModelSize | None, stages: Collection[str], folder: Path) -> str:
    """Compare the bytes that ``stages`` write with the free disk of ``folder``; empty if unknown.

    Raises:
        StorageError: they exceed the free disk, or nothing can be written there.
    """
    if size is None or not stages:
        return ""
    there = existing_parent(folder)
    disk = shutil.disk_usage(there)
    reasons = {
        f"{there} is no folder": there.is_dir(),
        "no disk, but a view of the system": disk.total,
        "no permission": os.access(there, os.W_OK),
    }
    if found := [reason for reason, is_fine in reasons.items() if not is_fine]:
        raise unwritable(folder, found[0])
    need, free = disk_need(config, size, stages), disk.free
    if need > free:
        raise StorageError(
            f"the run writes about {format_bytes(need)}, and {format_bytes(free)} are free",
            where=str(folder),
            fix="make room there, or set RLCORE_HOME to a larger disk",
        )
    return f"disk: the run writes about {format_bytes(need)}, {format_bytes(free)} are free in {folder}"

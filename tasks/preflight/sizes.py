"""Size checks before a run: texts against the model's positions, files against the free disk."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

from rlcore.config import RlConfig
from rlcore.errors import StorageError
from rlcore.hardware.memory_plan import ModelSize, format_bytes
from rlcore.tasks.presets.graph import data_of, evaluated_data, rl_of, sampling_of
from rlcore.tasks.presets.run import RunConfig
from rlcore.tasks.steps.algorithm_facts import uses_critic
from rlcore.tasks.store.disk import existing_parent
from rlcore.tasks.store.settings import unwritable

_COPIES = 2  # copies of each checkpoint: the artifact and the registered model
_CHECKPOINTS = 3  # of a running RL stage: the newest two, and one being written
_LEARNER_BYTES = 12  # bytes per weight in those: float32 and Adam's two moments
_WEIGHT_BYTES = 4  # bytes per saved weight, at most
_ROLLOUT_BYTES = 24  # bytes per token in a table: id, log-probability, mask, text


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
    """Yield the limits of agents' prompts that are below those of the data, or leave no room for completions."""
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
    """Estimate the bytes of the checkpoints that an RL stage keeps; those of LoRA are negligible."""
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

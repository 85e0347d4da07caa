"""Checks of sizes before work: texts against the model's positions, and a run's files against the free disk."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterator
from pathlib import Path

from transformers import PretrainedConfig

from rlcore.algorithms.resolve import resolve_algorithm
from rlcore.config import RlConfig
from rlcore.errors import StorageError
from rlcore.hardware.memory_plan import ModelSize, format_bytes
from rlcore.models.architectures import max_positions
from rlcore.tasks.presets.graph import evaluated_data
from rlcore.tasks.presets.run import RunConfig
from rlcore.tasks.presets.stages import data_of, rl_of, sampling_of

_COPIES = 2  # of each checkpoint that is made: the artifact, and the registered model
_CHECKPOINTS = 3  # of an RL run while it works: the newest two, and one that is being written
_LEARNER_BYTES = 12  # of a weight in those: float32 and Adam's two moments
_WEIGHT_BYTES = 4  # of a weight that is saved, at most
_ROLLOUT_BYTES = 24  # of a token in a table: its id, its log-probability, its mask, its text


def position_errors(
    config: RunConfig,
    model: PretrainedConfig | None,
    stages: Collection[str],
    data: Collection[str],
    *,
    is_evaluated: bool,
) -> Iterator[str]:
    """The settings that allow a row and its answer to be longer than the model's positions."""
    positions = max_positions(model) if model else None
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


def disk_need(config: RunConfig, model: PretrainedConfig, stages: Collection[str]) -> int:
    """Bytes that a run writes, about: checkpoints with their copies, those of RL while it works, and all rollouts."""
    parameters: int = ModelSize.of(model).num_parameters
    own = [config.stages[name] for name in stages]
    made: int = 1 + sum(stage.produces in ("checkpoint", "reward_model") for stage in own)
    rl = [found for stage in own if (found := rl_of(stage))]
    working = max((_working(each, parameters) for each in rl), default=0)
    tokens = sum(r.num_iterations * r.prompts_per_iteration * r.group_size * r.sampling.max_new_tokens for r in rl)
    return made * _COPIES * _WEIGHT_BYTES * parameters + working + _ROLLOUT_BYTES * tokens


def _working(rl: RlConfig, parameters: int) -> int:
    """Bytes of the checkpoints that a run keeps while it works; those of adapters are small beside all else."""
    if rl.update.lora.rank:
        return 0
    has_trunk = resolve_algorithm(rl).uses_critic and rl.critic.architecture == "separate"
    return _CHECKPOINTS * _LEARNER_BYTES * parameters * (1 + has_trunk)


def disk_summary(config: RunConfig, model: PretrainedConfig | None, stages: Collection[str], folder: Path) -> str:
    """A sentence: what ``stages`` write, and what is free on the disk of ``folder``; empty if unknown.

    Raises:
        StorageError: it is more than what is free.
    """
    if model is None or not stages:
        return ""
    need, free = disk_need(config, model, stages), free_bytes(folder)
    if need > free:
        raise StorageError(
            f"the run writes about {format_bytes(need)}, and {format_bytes(free)} are free",
            where=str(folder),
            fix="make room there, or set RLCORE_HOME to a larger disk",
        )
    return f"disk: the run writes about {format_bytes(need)}, {format_bytes(free)} are free"


def free_bytes(folder: Path) -> int:
    """Free bytes on the disk of a folder, which need not exist yet."""
    there = next(each for each in (folder, *folder.resolve().parents) if each.exists())
    return shutil.disk_usage(there).free

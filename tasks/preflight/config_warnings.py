"""Warnings about valid but unusual values, logged before anything runs."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from typing import Any

from rlcore.config import RlConfig
from rlcore.tasks.kinds import StageConfig
from rlcore.tasks.kinds.win_rate.kind import DISJOINT, WinRateStage, shared_pairs
from rlcore.tasks.presets.graph import data_of, evaluated_data, gold_pairs_of, human_pairs_of
from rlcore.tasks.presets.run import RunConfig
from rlcore.tasks.steps.algorithm_facts import algorithm_facts

# The largest values of published and shipped recipes, with a margin.
TYPICAL_MAXIMUM = {
    "learning_rate": 0.1,
    "head_learning_rate": 1.0,
    "critic.learning_rate": 0.1,
    "group_size": 1024,
    "num_samples": 1024,
    "sampling.temperature": 2.0,
    "kl.coefficient": 10.0,
    "update.num_epochs": 64,
}
PRETRAINED_MAXIMUM = {"all weights": 1e-4, "LoRA": 1e-3}
"""Largest learning rates of recipes that start from a pretrained model. Made-up models bear more."""
_LORA_RANKS = ("update.lora.rank", "lora.rank", "backbone.lora.rank")


def unusual_values(config: RunConfig, stages: Collection[str]) -> list[str]:
    """Return a sentence for each value of these stages that exceeds the values of all recipes, or the data."""
    found = []
    for name in stages:
        stage, path = config.stages[name], f"stages.{name}"
        for key, largest in TYPICAL_MAXIMUM.items():
            value = _value(stage.settings, key)
            if value is not None and value > largest:
                found.append(f"warning: {path}.{key} = {value!r}: recipes have at most {largest!r}; is this intended?")
        if config.model.source != "scratch":
            found += _pretrained_rate(path, stage)
        found += [*_beyond_the_data(config, path, stage), *_late_warmup(config, path, stage), *_scaled_kl(path, stage)]
        if isinstance(stage, WinRateStage):
            found += [
                f"warning: {path}.judge: {reason}; its win rate is not trusted, and promotes nothing; {DISJOINT}"
                for reason in shared_pairs(config, stage)
            ]
    return found


def _pretrained_rate(path: str, stage: StageConfig) -> Iterator[str]:
    """Warn about a learning rate that is usual for small models from scratch, and wrecks a pretrained one."""
    trained = "LoRA" if any(_value(stage.settings, rank) for rank in _LORA_RANKS) else "all weights"
    value, largest = _value(stage.settings, "learning_rate"), PRETRAINED_MAXIMUM[trained]
    if value is not None and largest < value <= TYPICAL_MAXIMUM["learning_rate"]:
        yield (
            f"warning: {path}.learning_rate = {value!r}: recipes that train {trained} of a pretrained model have at "
            f"most {largest!r}; is this intended?"
        )


def _scaled_kl(path: str, stage: StageConfig) -> Iterator[str]:
    """Warn about a KL in rewards divided by the group's std: with equal scores, the KL alone is scaled to 1."""
    rl = stage.settings
    if not isinstance(rl, RlConfig) or rl.kl.apply_to == "loss" or rl.kl.coefficient == 0.0:
        return
    if algorithm_facts(rl).scale in ("group", "group_sample"):
        yield (
            f"warning: {path}.kl.apply_to = 'reward': {rl.algorithm} divides by the group's standard deviation, so a "
            "group of equal scores is trained on its KL alone, scaled up; is 'loss' intended?"
        )


def _most_rows(config: RunConfig, stage: StageConfig) -> float:
    """Return the largest number of a stage's training rows; infinite if another stage makes some."""
    return sum(config.data[name].num_train if name in config.data else math.inf for name in data_of(stage))


def unread_data(config: RunConfig) -> list[str]:
    """Return a sentence for each dataset that a run prepares for nothing."""
    stages = config.stages.values()
    read = {name for each in stages for name in (*data_of(each), *gold_pairs_of(each), *human_pairs_of(each))}
    unread = [name for name in config.data if name not in read.union(evaluated_data(config))]
    return [f"warning: data.{name}: no stage reads it; leave it out: without = ['data.{name}']" for name in unread]


def _value(settings: Any, key: str) -> float | None:
    for part in key.split("."):
        settings = getattr(settings, part, None)
    return settings if isinstance(settings, int | float) else None


def _beyond_the_data(config: RunConfig, path: str, stage: StageConfig) -> Iterator[str]:
    rows, names = _most_rows(config, stage), ", ".join(data_of(stage))
    for key in ("prompts_per_iteration", "batch_size"):
        value = _value(stage.settings, key)
        if value is not None and value > rows:
            yield f"warning: {path}.{key} = {value!r}: more than the {rows} training rows of {names}"


def _late_warmup(config: RunConfig, path: str, stage: StageConfig) -> Iterator[str]:
    settings, steps = stage.settings, _most_steps(config, stage)
    if isinstance(settings, RlConfig) and settings.critic.warmup_iterations >= settings.num_iterations:
        named = f"{path}.critic.warmup_iterations = {settings.critic.warmup_iterations}"
        yield f"warning: {named}: none of the {settings.num_iterations} iterations trains the policy; is this intended?"
    for key in ("optim", "update.optim", "critic.optim"):
        value = _value(settings, f"{key}.warmup_steps")
        if value is not None and value > steps:
            named = f"{path}.{key}.warmup_steps = {value}"
            yield f"warning: {named}: the stage has at most {steps:g} steps; is this intended?"


def _most_steps(config: RunConfig, stage: StageConfig) -> float:
    """Return the number of a stage's optimizer steps if none is skipped; NaN if its rows are not known yet."""
    if isinstance(settings := stage.settings, RlConfig):
        return settings.num_iterations * settings.update.num_epochs * settings.update.num_minibatches
    epochs, batch = _value(settings, "num_epochs") or 1, _value(settings, "batch_size") or 1
    return _value(settings, "num_steps") or epochs * -(-_most_rows(config, stage) // batch)

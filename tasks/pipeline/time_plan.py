"""Estimate of the time of a run: from earlier runs of a stage on this machine, else from a rough model. No promise."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlcore.config import to_dict
from rlcore.hardware.memory_plan import ModelSize
from rlcore.tasks.pipeline.budget import above_budget
from rlcore.tasks.pipeline.machine import known_machine
from rlcore.tasks.presets.graph import evaluated_data
from rlcore.tasks.presets.run import RunConfig
from rlcore.tasks.presets.stages import data_of
from rlcore.tasks.store.cache import Record, StageCache
from rlcore.tasks.store.nested import flatten
from rlcore.tasks.store.settings import Home

# Settings that multiply the work of a stage: their ratio scales the time of an earlier run.
_FACTORS = (
    *("num_iterations", "prompts_per_iteration", "group_size", "num_samples", "max_new_tokens"),
    *("num_steps", "num_epochs"),
)
_ALIKE = 10.0  # times the work: a larger or smaller run says little, because part of its time does not scale
_OPERATIONS = {"cpu": 5e10, "cuda": 1e14}  # per second and thread, or GPU, that training reaches: rough
_FORWARD, _TRAINED = 2, 6  # operations per parameter and token
_TOKEN_AT_A_TIME = 4  # decoding reaches this fraction of the speed of a forward pass
_OVERHEAD = 3.0  # seconds of a stage besides its arithmetic


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Estimated seconds of a stage; ``is_known``: scaled from an earlier run."""

    stage: str
    seconds: float
    is_known: bool


def time_lines(config: RunConfig, size: ModelSize | None, stages: Collection[str], home: Home) -> list[str]:
    """Return a line on the time that the stages take, with the longest, and warnings about the budget.

    There is no line if nothing is known.
    """
    found = list(_estimates(config, size, stages, StageCache(home.cache)))
    if not found:
        return []
    total = sum(each.seconds for each in found)
    longest = sorted(found, key=lambda each: -each.seconds)[:3]
    parts = ", ".join(f"{each.stage} {_shown(each.seconds)}" for each in longest if each.seconds >= 1)
    known = [each for each in found if each.is_known]
    how = (
        "from earlier runs on this machine"
        if len(known) == len(found)
        else f"{len(known)} of {len(found)} stages from earlier runs, the others by a rough model of the arithmetic"
        if known
        else "by a rough model of the arithmetic; it may be wrong by a factor of three"
    )
    return [f"time: about {_shown(total)} ({parts}); estimated {how}", *above_budget(config, home, total)]


def _estimates(
    config: RunConfig, size: ModelSize | None, stages: Collection[str], cache: StageCache
) -> Iterator[Estimate]:
    machine = known_machine(config.hardware).facts
    speed = _OPERATIONS[machine["device"]] * max(machine["threads"], 1)
    for name in stages:
        settings = _settings(config, name)
        records = [each for each in cache.records(name) if each.ingredients.get("machine") in (machine, {})]
        alike = [each for each in records if 1 / _ALIKE <= _ratio(settings, each) <= _ALIKE]
        if alike:
            last = max(alike, key=lambda each: each.created)
            yield Estimate(stage=name, seconds=last.seconds * _ratio(settings, last), is_known=True)
        elif size is not None and (name in config.stages or name.startswith("evaluate_")):
            operations = size.num_parameters * _tokens(config, name, settings)
            yield Estimate(stage=name, seconds=_OVERHEAD + operations / speed, is_known=False)


def _settings(config: RunConfig, name: str) -> dict[str, Any]:
    """Return the settings that decide the work of a stage, by dotted key; none of an import or of data."""
    if name in config.stages:
        return flatten(to_dict(config.stages[name].settings))
    return flatten(to_dict(config.evaluation)) if name.startswith("evaluate_") else {}


def _factor(settings: Mapping[str, Any]) -> float:
    values = (value for key, value in settings.items() if key.rpartition(".")[2] in _FACTORS and value)
    return math.prod(float(value) for value in values if isinstance(value, int | float))


def _ratio(settings: Mapping[str, Any], record: Record) -> float:
    """Return the work of these settings relative to that of an earlier run."""
    config = record.ingredients.get("config", {})
    before = _factor(flatten(config.get("stage") or config.get("evaluation") or {}))
    return _factor(settings) / before if settings and before else 1.0


def _tokens(config: RunConfig, name: str, settings: Mapping[str, Any]) -> float:
    """Return the tokens of a stage, each weighed by its operations per parameter; texts are as long as they may be."""
    stage = config.stages.get(name)
    names = data_of(stage) if stage else evaluated_data(config)
    own: Sequence[str] = [each for each in names if each in config.data]
    longest = max((config.data[each].max_tokens for each in own), default=0)
    written = next((value for key, value in settings.items() if key.endswith("max_new_tokens")), 0)
    if not written:
        rows = sum(config.data[each].num_train for each in own) * settings.get("num_epochs", 1)
        if "num_steps" in settings:
            rows = settings["num_steps"] * settings.get("batch_size", 1)
        return float(_TRAINED * rows * longest)
    decoded = _FORWARD * (longest + _TOKEN_AT_A_TIME * written)
    if "num_iterations" in settings:
        samples = settings["num_iterations"] * settings["prompts_per_iteration"] * settings["group_size"]
        return float(samples * (decoded + _TRAINED * (longest + written)))
    problems = settings.get("num_problems") or sum(config.data[each].num_eval for each in own)
    return float(problems * max(settings.get("num_samples", 1) or 1, 1) * decoded)


def _shown(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 90 else f"{minutes / 60:.1f} h"

"""Time of a run, from earlier runs of its stages on this machine. No promise."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from rlcore.config import to_dict
from rlcore.tasks.pipeline.budget import above_budget
from rlcore.tasks.pipeline.machine import known_machine
from rlcore.tasks.presets.run import RunConfig
from rlcore.tasks.store.cache import Record, StageCache
from rlcore.tasks.store.nested import flatten
from rlcore.tasks.store.settings import Home

# Settings that multiply the work of a stage: their ratio scales the time of an earlier run.
_FACTORS = (
    *("num_iterations", "prompts_per_iteration", "group_size", "num_samples", "max_new_tokens"),
    *("num_steps", "num_epochs"),
)
_ALIKE = 10.0  # times the work: a larger or smaller run says little, because part of its time does not scale


def time_lines(config: RunConfig, stages: Collection[str], home: Home) -> list[str]:
    """Return a line on the time that the stages take, with those of unknown time, and warnings about the budget."""
    found = {name: _seconds(config, name, StageCache(home.cache)) for name in stages}
    known = {name: seconds for name, seconds in found.items() if seconds is not None}
    unknown = f"unknown for {', '.join(name for name in found if name not in known)}" if len(known) < len(found) else ""
    if not known:
        return [f"time: {unknown}; none of them ran on this machine before"] if unknown else []
    total = sum(known.values())
    longest = sorted(known, key=lambda name: -known[name])[:3]
    parts = ", ".join(f"{name} {_shown(known[name])}" for name in longest if known[name] >= 1)
    line = f"time: about {_shown(total)}{parts and f' ({parts})'} by earlier runs on this machine"
    return ["; ".join(filter(None, (line, unknown))), *above_budget(config, home, total)]


def _seconds(config: RunConfig, name: str, cache: StageCache) -> float | None:
    """Return the time of the newest run of a stage on this machine, scaled by its work; None if there is none."""
    machine, settings = known_machine(config.hardware).facts, _settings(config, name)
    records = [each for each in cache.records(name) if each.ingredients.get("machine") in (machine, {})]
    alike = [each for each in records if 1 / _ALIKE <= _ratio(settings, each) <= _ALIKE]
    last = max(alike, key=lambda each: each.created, default=None)
    return None if last is None else last.seconds * _ratio(settings, last)


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


def _shown(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 90 else f"{minutes / 60:.1f} h"

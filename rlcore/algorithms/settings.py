"""A row of the table with the constants that a run sets otherwise."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from rlcore.algorithms.table import Algorithm
from rlcore.algorithms.weighting import WEIGHTINGS, WeightingFn
from rlcore.config import ObjectiveConfig
from rlcore.errors import ConfigError

#: which of the row's functions a setting is a constant of
HOLES: Mapping[str, str] = {
    "scale": "advantage",
    "clip_low": "surrogate",
    "clip_high": "surrogate",
    "dual_clip": "surrogate",
    "gate_positive": "surrogate",
    "gate_negative": "surrogate",
}


def with_objective(row: Algorithm, objective: ObjectiveConfig, *, name: str, max_new_tokens: int) -> Algorithm:
    """The row ``name`` with every constant that ``objective`` sets; ``max_new_tokens``: constant length where none is.

    A constant has a meaning for a row exactly when the row's function takes it as a keyword, so a new function needs
    no entry anywhere.

    Raises:
        ConfigError: a setting that means nothing for this row.
    """
    for setting, hole in HOLES.items():
        value = getattr(objective, setting)
        if value is not None:
            row = _bind(row, hole, setting, value, name)
    return replace(row, weighting=_weighting(row, objective, name, max_new_tokens))


def _bind(row: Algorithm, hole: str, setting: str, value: float | str, name: str) -> Algorithm:
    function = getattr(row, hole)
    known = inspect.signature(function).parameters
    if setting not in known:
        own = [other for other, place in HOLES.items() if place == hole and other in known]
        raise _meaningless(setting, name, fix=f"its {hole} knows {', '.join(own) or 'no such constant'}")
    changed: dict[str, Any] = {hole: partial(function, **{setting: value})}
    return replace(row, **changed)


def _weighting(row: Algorithm, objective: ObjectiveConfig, name: str, max_new_tokens: int) -> WeightingFn:
    chosen: Callable[..., torch.Tensor] = row.weighting
    if objective.weighting is not None:
        chosen = WEIGHTINGS[objective.weighting]
    if "length" in inspect.signature(chosen).parameters:
        return partial(chosen, length=objective.constant_length or max_new_tokens)
    if objective.constant_length is not None:
        raise _meaningless("constant_length", name, fix='set weighting = "constant" too, or drop it')
    return chosen


def _meaningless(setting: str, name: str, *, fix: str) -> ConfigError:
    return ConfigError(f"{setting} means nothing for {name}", where=f"update.objective.{setting}", fix=fix)

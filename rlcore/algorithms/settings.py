"""The algorithm of a run: a row of the table with the constants that the run sets otherwise."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from rlcore.algorithms.table import ALGORITHMS, Algorithm, algorithms
from rlcore.algorithms.weighting import WEIGHTINGS, WeightingFn
from rlcore.config import ObjectiveConfig, RlConfig
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


def resolve_algorithm(config: RlConfig) -> Algorithm:
    """The row of the table that the configuration names, with its constants.

    Raises:
        ConfigError: no such row, or a constant that means nothing for it.
    """
    name, critic, limit = config.algorithm, config.critic, config.sampling.max_new_tokens
    if name not in ALGORITHMS:
        raise ConfigError(f"unknown algorithm {name!r}", fix=f"choose one of {', '.join(ALGORITHMS)}")
    if ALGORITHMS[name].uses_critic and config.sampling.max_replacements:
        raise ConfigError(
            f"max_replacements means nothing for {name}: with a critic, groups of equal rewards teach too",
            where="sampling.max_replacements",
            fix="set it to 0, or choose an algorithm without a critic",
        )
    constants = {"gamma": critic.gamma, "lam": critic.lam, "lam_alpha": critic.gae.lam_alpha}
    row = algorithms(**constants, lam_value=critic.gae.lam_value, max_new_tokens=limit)[name]
    return with_objective(row, config.update.objective, name=name, max_new_tokens=limit)


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

"""Resolve an algorithm: its row of the table, with the constants of a run's configuration."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from types import MappingProxyType
from typing import Any

from rlcore.algorithms.advantages import per_token_reward
from rlcore.algorithms.table import ALGORITHMS, Algorithm
from rlcore.algorithms.weighting import WEIGHTINGS
from rlcore.config import ObjectiveConfig, RlConfig
from rlcore.errors import ConfigError

_SLOTS = ("advantage", "ratio", "surrogate", "weighting")
_PENALTY = {"penalty_coefficient": "coefficient", "penalty_target": "target"}  # constants of a row's penalty


def resolve_algorithm(rl: RlConfig) -> Algorithm:
    """Return the configured row of the table, with the run's constants.

    Raises:
        ConfigError: The row does not exist, or does not use one of the constants.
    """
    if rl.algorithm not in ALGORITHMS:
        raise ConfigError(f"unknown algorithm {rl.algorithm!r}", fix=f"choose one of {', '.join(ALGORITHMS)}")
    _refuse_signal_of_groups(rl)
    _refuse_penalty_of_one_step(rl)
    if ALGORITHMS[rl.algorithm].advantage is per_token_reward and not (
        rl.kl.coefficient and rl.kl.apply_to == "reward"
    ):
        raise ConfigError(
            f"{rl.algorithm} trains on per-token rewards, but the KL to the reference policy is not in the reward",
            where="kl.apply_to",
            fix="set kl.apply_to = 'reward' and kl.coefficient = 1.0",
        )
    critic = rl.critic
    run = {"gamma": critic.gamma, "lam": critic.lam, "constant_length": rl.sampling.max_new_tokens}
    return with_objective(ALGORITHMS[rl.algorithm], rl.update.objective, name=rl.algorithm, run=run)


def _refuse_signal_of_groups(rl: RlConfig) -> None:
    """Raise ConfigError if zero-signal groups are skipped or replaced although they carry a signal."""
    row, sampling = ALGORITHMS[rl.algorithm], rl.sampling
    if not row.uses_critic and row.advantage is not per_token_reward:
        return
    why = "a critic" if row.uses_critic else "per-token rewards"
    for name, is_set, off in (
        ("dynamic_sampling_rounds", sampling.dynamic_sampling_rounds > 0, 0),
        ("zero_signal_keep_prob", sampling.zero_signal_keep_prob < 1.0, 1),
    ):
        if is_set:
            raise ConfigError(
                f"{rl.algorithm} does not use {name}: with {why}, groups of equal rewards have a signal",
                where=f"sampling.{name}",
                fix=f"set it to {off}, or choose an algorithm whose advantages compare a group's rewards",
            )


def _refuse_penalty_of_one_step(rl: RlConfig) -> None:
    """Raise ConfigError if an algorithm with a penalty takes one step per iteration."""
    if ALGORITHMS[rl.algorithm].penalty and rl.steps_per_iteration == 1:
        raise ConfigError(
            f"{rl.algorithm} needs several optimizer steps per iteration: in the first, the policy is the old policy, "
            "and the penalty has no gradient",
            where="update.num_minibatches",
            fix="set update.num_epochs to 2, or update.num_minibatches to 2 with 2 prompts per iteration, or more",
        )


def with_objective(
    row: Algorithm, objective: ObjectiveConfig, *, name: str, run: Mapping[str, Any] = MappingProxyType({})
) -> Algorithm:
    """Return the row ``name`` with all constants that ``objective`` sets, and those of ``run`` that the row uses.

    Raises:
        ConfigError: The row does not use a setting of ``objective``.
    """
    chosen = {setting: value for setting, value in asdict(objective).items() if value is not None}
    if "weighting" in chosen:
        row = replace(row, weighting=WEIGHTINGS[chosen.pop("weighting")])
    known = [setting for setting in asdict(objective) if setting in constants_of(row)]
    for setting in chosen:
        if setting not in known:
            raise ConfigError(
                f"{name} does not use {setting}",
                where=f"update.objective.{setting}",
                fix=f"it uses: {', '.join(known) or 'no constant'}",
            )
    return with_constants(row, {**run, **chosen})


def with_constants(row: Algorithm, constants: Mapping[str, Any]) -> Algorithm:
    """Bind the constants to each function of the row that has a keyword of that name, and set those of its penalty."""
    changed: dict[str, Any] = {}
    for slot in _SLOTS:
        function = getattr(row, slot)
        used = {name: value for name, value in constants.items() if name in _keywords(function)}
        if used:
            changed[slot] = partial(function, **used)
    penalty = {field: constants[name] for name, field in _PENALTY.items() if name in constants}
    if row.penalty and penalty:
        changed["penalty"] = replace(row.penalty, **penalty)
    return replace(row, **changed)


def constants_of(row: Algorithm) -> set[str]:
    """Return the names of a row's constants: the keyword-only parameters of its functions, and those of its penalty."""
    return {name for slot in _SLOTS for name in _keywords(getattr(row, slot))} | set(_PENALTY if row.penalty else ())


def _keywords(function: Any) -> set[str]:
    parameters = inspect.signature(function).parameters.values()
    return {parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}

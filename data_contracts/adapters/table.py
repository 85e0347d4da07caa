"""Table of adapters: conversion of each known source to contract rows, by kind of dataset."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rlcore.data_contracts.adapters import livecodebench, procedural, public
from rlcore.data_contracts.adapters.fields import (
    Row,
    items,
    messages,
    number,
    optional_split,
    refuse_misspelt,
    refuse_other_contract,
    text,
)
from rlcore.data_contracts.characters import has_visible
from rlcore.data_contracts.contracts import code_tasks, demonstrations, preference_pairs, prompts, ranked_sets
from rlcore.data_contracts.contracts.contract import Contract
from rlcore.data_contracts.contracts.preference_pairs import single
from rlcore.data_contracts.errors import RowError
from rlcore.data_contracts.gate.stream import RowFn

_NUMBERS = ("margin", "probability", "weight")
Kind = Literal["prompts", "demonstrations", "preferences"]
Scalar = str | int | float | bool

CONTRACTS: Mapping[Kind, Contract] = {
    "prompts": prompts.CONTRACT,
    "demonstrations": demonstrations.CONTRACT,
    "preferences": preference_pairs.CONTRACT,
}


@dataclass(frozen=True, kw_only=True)
class Option:
    """Option of a generator: its default, which determines its type, and limits of numbers."""

    default: Scalar
    low: float = float("-inf")
    high: float = float("inf")


@dataclass(frozen=True, kw_only=True)
class Generator:
    """Generator of rows: ``make(rng, num_train=…, num_eval=…, **options)`` returns contract rows with their split.

    ``takes_settings``: options with dotted names go to ``make`` together, as ``settings``.
    """

    make: Callable[..., list[dict[str, Any]]]
    options: Mapping[str, Option] = field(default_factory=dict)
    takes_settings: bool = False


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """Functions of one adapter name, per kind of dataset: functions of source rows, or generators of rows.

    ``contracts``: stricter contracts than those of ``CONTRACTS``, with the same columns. ``is_exact``: its rows differ
    in characters that are meaningless elsewhere.
    """

    rows: Mapping[Kind, RowFn] = field(default_factory=dict)
    generators: Mapping[Kind, Generator] = field(default_factory=dict)
    contracts: Mapping[Kind, Contract] = field(default_factory=dict)
    is_exact: bool = False


def own_prompts(row: Row) -> list[dict[str, Any]]:
    """Convert rows in the columns of ``prompts/v1``; ``split`` is optional."""
    return _own(row, ("prompt_id", "reference", "task"), prompts.CONTRACT)


def own_code_tasks(row: Row) -> list[dict[str, Any]]:
    """Convert rows in the columns of ``code_tasks/v1``; ``split`` is optional."""
    return _own(row, ("prompt_id", "reference", "task"), code_tasks.CONTRACT)


def own_demonstrations(row: Row) -> list[dict[str, Any]]:
    """Convert rows in the columns of ``demonstrations/v1``; ``split`` is optional."""
    return _own(row, ("demonstration_id", "completion", "reference", "task"), demonstrations.CONTRACT)


def own_preferences(row: Row) -> list[dict[str, Any]]:
    """Convert rows in the columns of ``preference_pairs/v2``.

    Optional are ``split``, ``set_id`` (the pair's own id), ``margin`` (0), ``probability`` (1) and ``weight`` (1).
    """
    (made,) = _own(
        row, ("pair_id", "chosen", "rejected", "source"), preference_pairs.CONTRACT, optional=("set_id", *_NUMBERS)
    )
    given = {"set_id": text(row, "set_id")} if "set_id" in row else {}
    numbers = {name: number(row, name) for name in _NUMBERS if name in row}
    return [{**single(made["pair_id"]), **made, **given, **numbers}]


def own_ranked_sets(row: Row) -> list[dict[str, Any]]:
    """Convert rows in the columns of ``ranked_sets/v1`` to their pairs; ``split`` is optional."""
    (made,) = _own(row, ("set_id",), ranked_sets.CONTRACT)
    for name, kind in (("completions", str), ("ranks", int)):
        for place, item in enumerate(items(row, name)):
            if type(item) is not kind:
                raise RowError(f"{name}.{place}", f"must be of type {kind.__name__}", item)
            if isinstance(item, str) and not has_visible(item):
                raise RowError(f"{name}.{place}", "must not be blank", item)
    pairs = ranked_sets.expand(made["set_id"], made["messages"], row["completions"], row["ranks"], source="ranked_sets")
    return [{**pair, **optional_split(row)} for pair in pairs]


def _own(row: Row, texts: Sequence[str], contract: Contract, *, optional: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Read the texts of a row in contract columns, its conversation and its split; reject misspelt optional fields."""
    refuse_other_contract(row, contract.name)
    refuse_misspelt(row, ("split", "contract", *optional))
    return [{**{name: text(row, name) for name in texts}, "messages": messages(row), **optional_split(row)}]


ADAPTERS: Mapping[str, Adapter] = {
    "prompts": Adapter(rows={"prompts": own_prompts}),
    "code_tasks": Adapter(rows={"prompts": own_code_tasks}, contracts={"prompts": code_tasks.CONTRACT}),
    "humaneval": Adapter(rows={"prompts": public.humaneval_prompts}, contracts={"prompts": code_tasks.CONTRACT}),
    "livecodebench": Adapter(
        rows={"prompts": livecodebench.livecodebench_prompts}, contracts={"prompts": code_tasks.CONTRACT}
    ),
    "demonstrations": Adapter(rows={"demonstrations": own_demonstrations}),
    "preferences": Adapter(rows={"preferences": own_preferences}),
    "ranked_sets": Adapter(rows={"preferences": own_ranked_sets}),
    "alpaca_eval": Adapter(rows={"preferences": public.alpaca_eval_pairs, "prompts": public.alpaca_eval_prompts}),
    "gsm8k": Adapter(rows={"prompts": public.gsm8k_prompts, "demonstrations": public.gsm8k_demonstrations}),
    "hh": Adapter(rows={"preferences": public.hh_pairs, "prompts": public.hh_prompts}),
    "ultrafeedback": Adapter(rows={"preferences": public.ultrafeedback_pairs, "prompts": public.ultrafeedback_prompts}),
    "ultrafeedback_binarized": Adapter(
        rows={
            "preferences": public.ultrafeedback_binarized_pairs,
            "prompts": public.ultrafeedback_binarized_prompts,
        }
    ),
    "problems": Adapter(rows={"prompts": public.problem_prompts}),
    "reasoning_gym": Adapter(
        is_exact=True,  # puzzles of brackets, drawings of signs, a message in invisible characters
        generators={
            "prompts": Generator(
                make=procedural.generate_prompts,
                options={"tasks": Option(default=procedural.WORKED_TASK)},
                takes_settings=True,
            ),
            "demonstrations": Generator(
                make=procedural.generate_demonstrations,
                options={
                    "tasks": Option(default=procedural.WORKED_TASK),
                    "direct_share": Option(default=0.5, low=0.0, high=1.0),
                },
                takes_settings=True,
            ),
        },
    ),
}

# rows that are in contract columns already
OWN_ROWS: Mapping[Kind, RowFn] = {
    "prompts": own_prompts,
    "demonstrations": own_demonstrations,
    "preferences": own_preferences,
}

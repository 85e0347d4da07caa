"""Table of adapters: conversion of each known source to contract rows, by kind of dataset."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rlcore.data_contracts.adapters import code_sets, procedural
from rlcore.data_contracts.adapters.expressions import Kind, Row, Scalar, parse_columns
from rlcore.data_contracts.adapters.fields import (
    items,
    messages,
    number,
    refuse_misspelt,
    refuse_other_contract,
    split_of,
    text,
)
from rlcore.data_contracts.adapters.layouts import LAYOUTS, Layout
from rlcore.data_contracts.adapters.mapping import declared, reference_text, row_id
from rlcore.data_contracts.characters import has_visible
from rlcore.data_contracts.contracts import code_tasks
from rlcore.data_contracts.contracts.contract import Contract
from rlcore.data_contracts.contracts.datasets import (
    DEMONSTRATIONS,
    PREFERENCE_PAIRS,
    PROMPTS,
    RANKED_SETS,
    expand,
    single,
)
from rlcore.data_contracts.errors import RowError
from rlcore.data_contracts.gate.reading import Source
from rlcore.data_contracts.gate.stream import RowFn

_NUMBERS = ("margin", "probability", "weight")
_ANSWERED = ("reference", "task")
_OWN = ("prompt_id", "messages", "reference", "task", "split", "contract")

CONTRACTS: Mapping[Kind, Contract] = {
    "prompts": PROMPTS,
    "demonstrations": DEMONSTRATIONS,
    "preferences": PREFERENCE_PAIRS,
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

    ``gathers``: the source whose rows the functions read, by kind, if that is not the file. ``spent``: columns that
    rewards need not see, because the contract's columns have their content. ``contracts``: stricter contracts than
    those of ``CONTRACTS``, with the same columns. ``is_exact``: its rows differ in characters that are meaningless
    elsewhere.
    """

    rows: Mapping[Kind, RowFn] = field(default_factory=dict)
    gathers: Mapping[Kind, Callable[[Source], Source]] = field(default_factory=dict)
    spent: Collection[str] = ()
    generators: Mapping[Kind, Generator] = field(default_factory=dict)
    contracts: Mapping[Kind, Contract] = field(default_factory=dict)
    is_exact: bool = False


def own_preferences(row: Row) -> list[dict[str, Any]]:
    """Convert rows in the columns of ``preference_pairs/v2``.

    Optional are ``pair_id``, ``split``, ``set_id`` (the pair's own id), ``margin`` (0), ``probability`` (1) and
    ``weight`` (1).
    """
    (made,) = _own(("chosen", "rejected", "source"), PREFERENCE_PAIRS, row, optional=("set_id", *_NUMBERS))
    given = {"set_id": text(row, "set_id")} if "set_id" in row else {}
    numbers = {name: number(row, name) for name in _NUMBERS if name in row}
    return [{**single(made["pair_id"]), **made, **given, **numbers}]


def own_ranked_sets(row: Row) -> list[dict[str, Any]]:
    """Convert rows in the columns of ``ranked_sets/v1`` to their pairs; ``set_id`` and ``split`` are optional."""
    (made,) = _own((), RANKED_SETS, row)
    for place, item in enumerate(items(row, "completions")):
        if type(item) is not str:
            raise RowError(f"completions.{place}", "must be a text", item)
        if not has_visible(item):
            raise RowError(f"completions.{place}", "must not be blank", item)
    for place, item in enumerate(items(row, "ranks")):
        if type(item) is not int and not (type(item) is float and item.is_integer()):
            raise RowError(f"ranks.{place}", "must be a whole number", item)
    pairs = expand(made["set_id"], made["messages"], row["completions"], row["ranks"], source="ranked_sets")
    return [{**pair, **split_of(row.get("split"))} for pair in pairs]


def _own(texts: Sequence[str], contract: Contract, row: Row, *, optional: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Read a row in contract columns; its id (else a hash) and split are optional. Reject misspelt optional fields."""
    name = contract.id_column
    refuse_other_contract(row, contract.name)
    refuse_misspelt(row, ("split", "contract", name, *optional))
    several = isinstance(row.get("reference"), list) and contract is not code_tasks.CONTRACT
    lists = {"reference": reference_text(row["reference"], "reference")} if several else {}
    made = {each: lists[each] if each in lists else text(row, each) for each in texts}
    asked = messages(row)
    answers = [made[each] for each in contract.answers]
    found = text(row, name) if name in row else row_id(name.removesuffix("_id"), asked, *answers)
    return [{name: found, **made, "messages": asked, **split_of(row.get("split"))}]


def declared_adapter(layout: Layout, name: str) -> Adapter:
    """Return the adapter that a layout declares.

    Raises:
        ValueError: a mapping is malformed.
    """
    found = {kind: declared(columns, kind, name=name) for kind, columns in layout.columns.items()}
    gathers = {kind: layout.gather or gather for kind, (_, gather) in found.items()}
    return Adapter(
        rows={kind: make for kind, (make, _) in found.items()},
        gathers={kind: gather for kind, gather in gathers.items() if gather},
        spent=_spent(layout),
    )


def _spent(layout: Layout) -> frozenset[str]:
    specs = {kind: parse_columns(columns, kind) for kind, columns in layout.columns.items()}
    read = {
        kind: {target: {path.partition(".")[0] for path in each.columns} for target, each in spec.items()}
        for kind, spec in specs.items()
    }
    own = read.get("prompts", {})
    asked = {column for target in ("prompt", "system") if target in own for column in own[target]}
    if "prompts" in specs and "{" in specs["prompts"]["prompt"].written:
        asked = set()  # choices and numbers of a template, which a reward may need
    others = set().union(*(columns for kind, by_target in read.items() for columns in by_target.values()))
    return frozenset(asked | (others - set().union(*own.values())))


_CODE: Mapping[Kind, Contract] = {"prompts": code_tasks.CONTRACT}
ADAPTERS: Mapping[str, Adapter] = {
    "prompts": Adapter(rows={"prompts": partial(_own, _ANSWERED, PROMPTS)}, spent=_OWN),
    "code_tasks": Adapter(rows={"prompts": partial(_own, _ANSWERED, code_tasks.CONTRACT)}, spent=_OWN, contracts=_CODE),
    **{
        name: Adapter(rows={"prompts": make}, spent=code_sets.COLUMNS[name], contracts=_CODE)
        for name, make in {
            "humaneval": code_sets.humaneval_prompts,
            "livecodebench": code_sets.livecodebench_prompts,
            "apps": code_sets.apps_prompts,
            "code_contests": code_sets.code_contests_prompts,
            "mbpp": code_sets.mbpp_prompts,
            "kodcode": code_sets.kodcode_prompts,
        }.items()
    },
    "demonstrations": Adapter(rows={"demonstrations": partial(_own, ("completion", *_ANSWERED), DEMONSTRATIONS)}),
    "preferences": Adapter(rows={"preferences": own_preferences}),
    "ranked_sets": Adapter(rows={"preferences": own_ranked_sets}),
    **{name: declared_adapter(layout, name) for name, layout in LAYOUTS.items()},
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

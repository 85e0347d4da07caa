"""Layouts that the first rows of a file fit, the mapping of each as a line of a preset, and the columns of a file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlcore.data_contracts.adapters.conversations import is_conversation
from rlcore.data_contracts.adapters.convert import contract_of, first_rows
from rlcore.data_contracts.adapters.expressions import Scalar, kind_of
from rlcore.data_contracts.adapters.layouts import LAYOUTS
from rlcore.data_contracts.adapters.table import ADAPTERS
from rlcore.data_contracts.adapters.targets import Kind, parse_columns
from rlcore.data_contracts.errors import LEFT_OUT, ContractError
from rlcore.data_contracts.gate.reading import Source, head_of

ROWS = 50  # that are tried
_FITS = 0.5  # fraction of them
_SHOWN = 40


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Adapter that reads a file: the kinds of rows that it gives, the columns that it reads, and those not there."""

    adapter: str
    kinds: tuple[Kind, ...]
    columns: frozenset[str]
    num_absent: int


def fits(source: Source) -> list[Fit]:
    """Return the adapters of files that read at least half of the first rows, the likeliest first.

    An adapter fits if its first kind of rows does. It is left out if another one reads its columns and more.

    Raises:
        ContractError: the source cannot be read, or has no row at its beginning.
    """
    head = head_of(source, ROWS)
    there = {name for row in rows_of(head) for name in row}
    if not there:
        raise _no_rows(head)
    found = []
    for name, adapter in ADAPTERS.items():
        first = next(iter(adapter.rows), None)
        if first is None or not _fits(head, name, first):
            continue
        kinds = (first, *(kind for kind in adapter.rows if kind != first and _fits(head, name, kind)))
        read = _columns_of(name, first)
        found.append(Fit(adapter=name, kinds=kinds, columns=frozenset(read & there), num_absent=len(read - there)))
    best = [one for one in found if not any(one.columns < other.columns for other in found)]
    return sorted(best, key=lambda fit: (-len(fit.columns), fit.num_absent, -_num_filters(fit), fit.adapter))


def _no_rows(head: Source) -> ContractError:
    lost = [f"; line {one.origin.line}: {one.reason}" for one in head.rejected]
    what = f"none of the first {len(lost)} lines is a row{lost[0]}" if lost else "there are no rows"
    return ContractError(what, where=head.name, fix="give one JSON object a line, or one row of cells")


def mapping_line(columns: Mapping[str, Scalar]) -> str:
    """Return a mapping as a line of TOML."""
    return f"columns = {{ {', '.join(f'{name} = {json.dumps(value)}' for name, value in columns.items())} }}"


def describe_columns(source: Source) -> list[str]:
    """Return the columns of the first rows with their types, nested ones of objects too.

    Raises:
        ContractError: the source cannot be read.
    """
    found: dict[str, list[str]] = {}
    for row in rows_of(head_of(source, ROWS)):
        for name, kind in _typed(row):
            kinds = found.setdefault(name, [])
            if kind not in kinds:
                kinds.append(kind)
    return [f"{name} ({' or '.join(kinds)})" for name, kinds in found.items()][:_SHOWN]


def skeleton(source: Source) -> str:
    """Return a mapping for the user to complete, with the columns whose names suggest a use."""
    names = [name for row in rows_of(head_of(source, ROWS)) for name, _ in _typed(row)]
    if {*_SIDES} <= {*names}:
        return mapping_line({"prompt": _guess(names, _USUAL["prompt"]) or "?", **{side: side for side in _SIDES}})
    guesses = {target: _guess(names, words) for target, words in _USUAL.items()}
    return mapping_line({target: name or "?" for target, name in guesses.items()})


def with_reference(source: Source, fit: Fit) -> str:
    """Return the mapping of a layout of prompts with a column that may be the reference it has none of; "" else."""
    columns = LAYOUTS[fit.adapter].columns.get("prompts", {}) if fit.adapter in LAYOUTS else {}
    names = [name for row in rows_of(head_of(source, ROWS)) for name, _ in _typed(row) if name not in fit.columns]
    found = "" if "reference" in columns or fit.kinds[0] != "prompts" else _guess(names, _USUAL["reference"])
    return mapping_line({**columns, "reference": found}) if columns and found else ""


_USUAL = {
    "prompt": ("prompt", "question", "problem", "query", "instruction", "input", "task", "text"),
    "reference": (
        "reference",
        "answer",
        "ground_truth",
        "solution",
        "target",
        "label",
        "output",
        "answers",
        "expected",
    ),
}


_SIDES = ("chosen", "rejected")


def _guess(names: Sequence[str], words: Sequence[str]) -> str:
    """Return the column that is one of the words, or else the first that has one, the likeliest word first."""
    plain = {name: f"_{re.sub(r'[^a-z0-9]+', '_', name.casefold())}_" for name in names}
    exact = (name for word in words for name in names if plain[name] == f"_{word}_")
    return next(exact, next((name for word in words for name in names if f"_{word}_" in plain[name]), ""))


def _fits(source: Source, adapter: str, kind: Kind) -> bool:
    tried = first_rows(
        source, kind, adapter=adapter, limit=ROWS, without={name for row in rows_of(source) for name in row}
    )
    lost = [one for one in tried.rejected if one.field and not one.reason.startswith(LEFT_OUT)]
    good = len(set(tried.lines)) + sum(one.reason.startswith(LEFT_OUT) for one in tried.rejected)
    is_any = bool(tried.lines) or (bool(good) and kind in ADAPTERS[adapter].gathers)  # of answers that more rows have
    return is_any and good >= _FITS * (good + len(lost))


def _columns_of(adapter: str, kind: Kind) -> set[str]:
    """Return the columns at the top of a row that an adapter reads."""
    if adapter not in LAYOUTS:
        return set(ADAPTERS[adapter].spent or contract_of(adapter, kind).columns) - {"contract"}
    spec = parse_columns(LAYOUTS[adapter].columns[kind], kind)
    return {path.partition(".")[0] for each in spec.values() for path in each.columns}


def _num_filters(fit: Fit) -> int:
    columns = LAYOUTS[fit.adapter].columns[fit.kinds[0]] if fit.adapter in LAYOUTS else {}
    return sum("|" in str(value) for value in columns.values())


def _typed(row: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in row.items():
        if isinstance(value, Mapping):
            for inner, item in value.items():
                yield f"{name}.{inner}", kind_of(item)
        elif isinstance(value, list) and is_conversation(value):
            yield name, "a list of turns"
        else:
            yield name, kind_of(value)


def rows_of(source: Source) -> list[Mapping[str, Any]]:
    """Return the rows of a short source, without its malformed lines."""
    return [row.values for row in source.rows]

"""Layouts that the first rows of a file fit, the mapping of each as a line of a preset, and the columns of a file."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rlcore.data_contracts.adapters.convert import contract_of, stream_of
from rlcore.data_contracts.adapters.expressions import Kind, Scalar, kind_of, parse_columns
from rlcore.data_contracts.adapters.fields import is_conversation
from rlcore.data_contracts.adapters.layouts import LAYOUTS
from rlcore.data_contracts.adapters.mapping import reference_text
from rlcore.data_contracts.adapters.table import ADAPTERS
from rlcore.data_contracts.contracts.contract import WHOLE_FRAME, row_violations
from rlcore.data_contracts.errors import LEFT_OUT, ContractError, LeftOutError, RowError, RowValueError
from rlcore.data_contracts.gate.reading import Source, head_of
from rlcore.data_contracts.gate.records import Quarantined
from rlcore.data_contracts.gate.row_rules import RowFilter

ROWS = 50  # that are tried
_FITS = 0.5  # fraction of them
_VARIES = 0.2  # fraction of rows with different prompts; a column of names has fewer
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
    return sorted(best, key=_likelihood)


def _likelihood(fit: Fit) -> tuple[int, int, int, int, str]:
    columns = LAYOUTS[fit.adapter].columns[fit.kinds[0]] if fit.adapter in LAYOUTS else {}
    num_filters, num_optional = (sum(mark in str(value) for value in columns.values()) for mark in "|?")
    return -len(fit.columns), fit.num_absent, num_optional, -num_filters, fit.adapter


def _no_rows(head: Source) -> ContractError:
    lost = [f"; line {one.origin.line}: {one.reason}" for one in head.rejected]
    what = f"none of the first {len(lost)} lines is a row{lost[0]}" if lost else "there are no rows"
    return ContractError(what, where=head.name, fix="give one JSON object a line, in UTF-8, or one row of cells")


def mapping_line(columns: Mapping[str, Scalar]) -> str:
    """Return a mapping as a line of TOML."""
    return f"columns = {{ {', '.join(f'{name} = {json.dumps(value)}' for name, value in columns.items())} }}"


def describe_columns(source: Source) -> list[str]:
    """Return the columns of the first rows with their types, nested ones of objects too.

    Raises:
        ContractError: the source cannot be read.
    """
    found = {name: " or ".join(dict.fromkeys(map(_type_of, values))) for name, values in _columns(source).items()}
    return [f"{name} ({kinds})" for name, kinds in found.items()][:_SHOWN]


def skeleton(source: Source, unusable: RowFilter) -> str:
    """Return a mapping for the user to complete, with the columns whose names and values suggest a use.

    ``unusable`` returns reasons against reference answers, by index.
    """
    columns = _columns(source)
    prompt = _guess([name for name, values in columns.items() if _are_prompts(values)], _USUAL["prompt"])
    if {*_SIDES} <= columns.keys():
        return mapping_line({"prompt": prompt or "?", **{side: side for side in _SIDES}})
    return mapping_line({"prompt": prompt or "?", "reference": _reference(columns, {prompt}, unusable) or "?"})


def with_reference(source: Source, fit: Fit, unusable: RowFilter) -> str:
    """Return the mapping of a layout of prompts with a column that may be the reference it has none of; "" else."""
    columns = LAYOUTS[fit.adapter].columns.get("prompts", {}) if fit.adapter in LAYOUTS else {}
    if not columns or "reference" in columns or fit.kinds[0] != "prompts":
        return ""
    found = _reference(_columns(source), fit.columns, unusable)
    return mapping_line({**columns, "reference": found}) if found else ""


_USUAL = {
    "prompt": "prompt question problem query instruction input task text",
    "reference": "reference answer ground_truth solution target label output answers expected",
}
_SIDES = ("chosen", "rejected")


def _guess(names: Sequence[str], usual: str) -> str:
    words, plain = usual.split(), {name: f"_{re.sub(r'[^a-z0-9]+', '_', name.casefold())}_" for name in names}
    exact = (name for word in words for name in names if plain[name] == f"_{word}_")
    return next(exact, next((name for word in words for name in names if f"_{word}_" in plain[name]), ""))


def _are_prompts(values: Sequence[Any]) -> bool:
    asked = [value for value in values if (isinstance(value, str) and value.strip()) or is_conversation(value)]
    num_different = len({json.dumps(value) for value in asked if str(value).lstrip()[:2] not in ('{"', '["')})
    return len(asked) > _FITS * len(values) and num_different > _VARIES * len(values)


def _reference(columns: Mapping[str, Sequence[Any]], others: Collection[str], unusable: RowFilter) -> str:
    names = [name for name in columns if name not in others and name.partition(".")[0] not in others]
    return _guess([name for name in names if _are_references(columns[name], unusable)], _USUAL["reference"])


def _are_references(values: Sequence[Any], unusable: RowFilter) -> bool:
    texts = []
    for value in values:
        with suppress(RowError):
            texts.append(reference_text(value, ""))
    return len([text for text in texts if text.strip()]) - len(unusable(texts)) > _FITS * len(values)


def _fits(source: Source, adapter: str, kind: Kind) -> bool:
    """Return True if columns and types of at least half of the rows are those of an adapter.

    Rows that break a rule of values, such as swapped scores, count as read: the check of all rows refuses them.
    """
    stream = stream_of(source, kind, adapter=adapter, without={name for row in rows_of(source) for name in row})
    made: list[dict[str, Any]] = []
    lines: list[int] = []
    num_left_out = num_faulty = num_lost = 0
    for line, item in stream.source.read(None):
        if isinstance(item, Quarantined):
            num_left_out += item.reason.startswith(LEFT_OUT)
            num_lost += bool(item.field) and not item.reason.startswith(LEFT_OUT)  # else malformed
            continue
        try:
            rows = [{"split": "train", **row} for row in stream.make(item.values)]
        except LeftOutError:
            num_left_out += 1
        except RowValueError:
            num_faulty += 1
        except RowError:
            num_lost += 1
        else:
            made, lines = [*made, *rows], [*lines, *[line] * len(rows)]
    broken = {lines[one.row] for one in row_violations(made, contract_of(adapter, kind)) if one.row != WHOLE_FRAME}
    good = len({*lines} - broken) + num_faulty
    is_any = bool(good) or (bool(num_left_out) and kind in ADAPTERS[adapter].gathers)  # of answers that more rows have
    return is_any and good + num_left_out >= _FITS * (good + num_left_out + num_lost + len(broken))


def _columns_of(adapter: str, kind: Kind) -> set[str]:
    if adapter not in LAYOUTS:
        return set(ADAPTERS[adapter].spent or contract_of(adapter, kind).columns) - {"contract"}
    spec = parse_columns(LAYOUTS[adapter].columns[kind], kind)
    return {path.partition(".")[0] for each in spec.values() for path in each.columns}


def _columns(source: Source) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for row in rows_of(head_of(source, ROWS)):
        for name, value in row.items():
            parts = {f"{name}.{key}": each for key, each in value.items()} if isinstance(value, Mapping) else {}
            for path, each in (parts or {name: value}).items():
                found.setdefault(path, []).append(each)
    return found


def _type_of(value: object) -> str:
    return "a list of turns" if isinstance(value, list) and is_conversation(value) else kind_of(value)


def rows_of(source: Source) -> list[Mapping[str, Any]]:
    """Return the rows of a short source, without its malformed lines."""
    return [row.values for row in source.rows]

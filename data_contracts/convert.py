"""Applying an adapter: a source, or a generator's rows, become candidates for the gate."""

from __future__ import annotations

import difflib
import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pandas as pd

from data_contracts.adapters import ADAPTERS, CONTRACTS, OWN_ROWS, Generator, Kind, Option, RowFn, Scalar
from data_contracts.contract import Contract
from data_contracts.errors import ContractError, RowFault
from data_contracts.gate import Candidates, GateLimits
from data_contracts.reading import Source, source_of
from data_contracts.records import Origin, Quarantined, SourceRow, canonical_json, excerpt
from data_contracts.splits import assign, held_out_prompts
from data_contracts.text import prompt_hash

Options = Mapping[str, Scalar]


def row_function(adapter: str, kind: Kind) -> RowFn:
    """The function of an adapter that reads rows of one kind.

    Raises:
        ContractError: unknown adapter, or one that cannot make this kind from a file.
    """
    rows = ADAPTERS[_known(adapter)].rows
    if kind not in rows:
        others = [name for name, known in ADAPTERS.items() if kind in known.rows]
        raise ContractError(
            f"the adapter {adapter!r} reads no {kind} from a file", fix=f"those that do: {', '.join(others)}"
        )
    return rows[kind]


def is_generator(adapter: str) -> bool:
    """Whether an adapter makes its rows, so that it needs no file.

    Raises:
        ContractError: unknown adapter.
    """
    return bool(ADAPTERS[_known(adapter)].generators)


def generate(kind: Kind, adapter: str, *, num_train: int, num_eval: int, seed: int, options: Options) -> Source:
    """Rows that an adapter makes up, a pure function of its arguments.

    Raises:
        ContractError: it makes no such kind, an unknown or ill-typed option, or it cannot make so many different rows.
    """
    generators = ADAPTERS[_known(adapter)].generators
    if kind not in generators:
        raise ContractError(f"the adapter {adapter!r} makes no {kind}", fix=f"it makes {', '.join(generators)}")
    generator = generators[kind]
    rng = random.Random(f"{adapter}/{kind}/{seed}")  # each kind draws problems of its own
    return source_of(
        adapter,
        generator.make(rng, num_train=num_train, num_eval=num_eval, **_arguments(generator, options, adapter)),
    )


def contract_of(adapter: str, kind: Kind) -> Contract:
    """What the rows of an adapter must be.

    Raises:
        ContractError: unknown adapter.
    """
    return ADAPTERS[_known(adapter)].contracts.get(kind, CONTRACTS[kind])


def reject_rows(candidates: Candidates, reasons: Mapping[int, str], *, field: str) -> Candidates:
    """The candidates without the rows (positions in the frame) that were found wanting, which are accounted for."""
    lost = [
        Quarantined(
            origin=candidates.origins[row],
            field=field,
            excerpt=excerpt(candidates.frame[field].iloc[row]),
            reason=reason,
        )
        for row, reason in reasons.items()
    ]
    left = [row for row in range(len(candidates.frame)) if row not in reasons]
    return replace(
        candidates,
        frame=candidates.frame.iloc[left].reset_index(drop=True),
        origins=[candidates.origins[row] for row in left],
        rejected=[*candidates.rejected, *lost],
    )


def known_options(adapter: str, kind: Kind) -> tuple[frozenset[str], bool]:
    """The options of an adapter, and whether it takes settings with a dot in their name besides.

    Raises:
        ContractError: unknown adapter.
    """
    generator = ADAPTERS[_known(adapter)].generators.get(kind, Generator(make=list))
    return frozenset(generator.options), generator.takes_settings


def candidates(source: Source, kind: Kind, limits: GateLimits, *, adapter: str, system: str = "") -> Candidates:
    """Contract rows of a source, each with its split and the place that it came from.

    ``system``: the system prompt of conversations that have none; empty: none.

    Raises:
        ContractError: unknown adapter, or a ``split`` that some rows have and others have not.
    """
    convert = OWN_ROWS[kind] if is_generator(adapter) else row_function(adapter, kind)
    rows: list[dict[str, Any]] = []
    origins: list[Origin] = []
    rejected = list(source.rejected)
    for one in source.rows:
        try:
            made = [_completed(row, one.split, system) for row in convert(one.values)]
        except RowFault as fault:
            rejected.append(_reject(one, fault))
        else:
            rows += made
            origins += [one.origin] * len(made)
    places = _first_places(rows)
    frame = _frame([rows[place] for place in places], kind, limits, where=source.name)
    return Candidates(
        source=source.name,
        frame=frame,
        origins=[origins[place] for place in places],
        rejected=rejected,
        lines_read=source.num_lines,
        merged=len(rows) - len(places),
    )


def _completed(row: dict[str, Any], split: str, system: str) -> dict[str, Any]:
    """A contract row with the side that its source is for, and with a system prompt.

    Raises:
        RowFault: it says itself that it is for the other side.
    """
    if split and row.get("split", split) != split:
        raise RowFault("split", f"its source is for {split!r}: leave eval_path or the column out", row["split"])
    given: dict[str, Any] = {"split": split} if split else {}
    messages = row["messages"]
    if system and not (messages and messages[0]["role"] == "system"):
        given["messages"] = [{"role": "system", "content": system}, *messages]
    return {**row, **given}


def _frame(rows: list[dict[str, Any]], kind: Kind, limits: GateLimits, *, where: str) -> pd.DataFrame:
    hashes = [prompt_hash(row["messages"]) for row in rows]
    held_out = held_out_prompts(
        hashes, num_train=limits.num_train, num_eval=limits.num_eval, first=limits.forbidden_prompts
    )
    splits = assign([row.get("split") for row in rows], hashes, held_out, where=where)
    divided = [{**row, "split": split} for row, split in zip(rows, splits, strict=True)]
    return pd.DataFrame(divided, columns=list(CONTRACTS[kind].columns))


def _first_places(rows: list[dict[str, Any]]) -> list[int]:
    """Rows that are equal in every column, id included, are one row: an export may hold some twice, and the prompts of
    a file of pairs come once for each pair.
    """
    first: dict[bytes, int] = {}
    for place, row in enumerate(rows):
        first.setdefault(canonical_json(row), place)
    return list(first.values())


def _reject(row: SourceRow, fault: RowFault) -> Quarantined:
    return Quarantined(origin=row.origin, field=fault.field, excerpt=excerpt(fault.value), reason=fault.reason)


def _known(adapter: str) -> str:
    if adapter not in ADAPTERS:
        close = difflib.get_close_matches(adapter, ADAPTERS, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(ADAPTERS)}"
        raise ContractError(f"unknown adapter {adapter!r}", fix=hint)
    return adapter


def _arguments(generator: Generator, options: Options, adapter: str) -> dict[str, Any]:
    settings = {name: value for name, value in options.items() if generator.takes_settings and "." in name}
    unknown = sorted(options.keys() - generator.options.keys() - settings.keys())
    if unknown:
        known = ", ".join(generator.options) or "none"
        raise ContractError(f"the adapter {adapter!r} has no option {unknown[0]!r}", fix=f"it has: {known}")
    arguments: dict[str, Any] = {
        name: _value(name, options.get(name, option.default), option) for name, option in generator.options.items()
    }
    return arguments | ({"settings": settings} if generator.takes_settings else {})


def _value(name: str, value: Scalar, option: Option) -> Scalar:
    if isinstance(option.default, float) and type(value) is int:
        value = float(value)
    if type(value) is not type(option.default):
        raise ContractError(f"option {name} = {value!r} must be of type {type(option.default).__name__}")
    if isinstance(value, float) and not option.low <= value <= option.high:
        raise ContractError(f"option {name} = {value!r} must be between {option.low:g} and {option.high:g}")
    return value

"""Conversion: an adapter turns a source, or a generator's rows, into a stream of contract rows for the gate."""

from __future__ import annotations

import difflib
import importlib
import json
import random
from collections.abc import Collection, Mapping
from dataclasses import replace
from decimal import Decimal
from functools import partial
from typing import Any

import orjson

from rlcore.data_contracts.adapters.expressions import Kind, Row, Scalar
from rlcore.data_contracts.adapters.fields import is_conversation
from rlcore.data_contracts.adapters.layouts import Layout
from rlcore.data_contracts.adapters.mapping import extra_columns
from rlcore.data_contracts.adapters.table import (
    ADAPTERS,
    CONTRACTS,
    Adapter,
    Generator,
    Option,
    declared_adapter,
)
from rlcore.data_contracts.contracts.contract import Contract
from rlcore.data_contracts.errors import ContractError, RowError
from rlcore.data_contracts.gate.reading import Source, head_of, source_of
from rlcore.data_contracts.gate.row_rules import contract_violations
from rlcore.data_contracts.gate.stream import Batch, RowFn, RowStream

Options = Mapping[str, Scalar]
_TYPES = {str: "string", int: "integer", float: "float", bool: "boolean"}  # in TOML's words
MAX_BYTES = 100_000  # of the columns that reach rewards
COLUMNS = "columns"
"""Adapter of a mapping of columns."""


def _row_function(found: Adapter, adapter: str, kind: Kind) -> RowFn:
    if kind not in found.rows:
        others = [name for name, known in ADAPTERS.items() if kind in known.rows]
        raise ContractError(
            f"the adapter {adapter!r} reads no {kind} from a file", fix=f"those that do: {', '.join(others)}"
        )
    return found.rows[kind]


def first_rows(
    source: Source,
    kind: Kind,
    *,
    adapter: str,
    limit: int,
    columns: Mapping[str, Scalar] | None = None,
) -> Batch:
    """Return the contract rows of the first ``limit`` lines of a source, and the lines that give none.

    ``adapter`` is a name of ``ADAPTERS``, ``module:NAME``, or ``columns`` for the mapping ``columns``. ``rejected`` of
    the result has each line that is malformed, or that the adapter or the contract refuses, with field and reason.
    Rules that compare rows, and token counts, are left to the gate. A source whose rows are gathered from several lines
    is read whole.

    Raises:
        ContractError: an unreadable source, an unknown adapter, one that does not read this kind, a malformed mapping.
    """
    stream = stream_of(source, kind, adapter=adapter, columns=columns)
    found, num_lines = Batch(), 0
    for batch in RowStream(source=head_of(stream.source, limit), make=stream.make).batches():
        refused = contract_violations(batch.rows, batch.origins, contract_of(adapter, kind))
        for place in sorted({*range(len(batch.rows))} - refused.keys()):
            found.rows.append(batch.rows[place])
            found.origins.append(batch.origins[place])
            found.lines.append(batch.lines[place])
        found.rejected.extend((*batch.rejected, *refused.values()))
        num_lines += batch.num_lines
    return replace(found, num_lines=num_lines)


def is_generator(adapter: str) -> bool:
    """Return True if an adapter generates its rows and needs no file.

    Raises:
        ContractError: unknown adapter.
    """
    return bool(_adapter(adapter).generators)


def is_exact(adapter: str) -> bool:
    """Return True if every character counts when two texts of an adapter are compared.

    Raises:
        ContractError: unknown adapter.
    """
    return _adapter(adapter).is_exact


def generate(kind: Kind, adapter: str, *, num_train: int, num_eval: int, seed: int, options: Options) -> Source:
    """Generate an adapter's rows, a pure function of the arguments.

    Raises:
        ContractError: it makes no such kind, an option is unknown or of the wrong type, or it has too few different
            rows.
    """
    generators = _adapter(adapter).generators
    if kind not in generators:
        raise ContractError(f"the adapter {adapter!r} makes no {kind}", fix=f"it makes {', '.join(generators)}")
    generator = generators[kind]
    name = adapter.partition(":")[0].rpartition(".")[2]  # of a dotted name, that of the module
    rng = random.Random(f"{name}/{kind}/{seed}")  # each kind draws different problems
    return source_of(
        name,
        generator.make(rng, num_train=num_train, num_eval=num_eval, **_arguments(generator, options, adapter)),
    )


def contract_of(adapter: str, kind: Kind) -> Contract:
    """Return the contract of an adapter's rows.

    Raises:
        ContractError: unknown adapter.
    """
    return _adapter(adapter).contracts.get(kind, CONTRACTS[kind])


def known_options(adapter: str, kind: Kind) -> tuple[frozenset[str], bool]:
    """Return the options of an adapter, and True if it also takes settings with dotted names.

    Raises:
        ContractError: unknown adapter.
    """
    generator = _adapter(adapter).generators.get(kind, Generator(make=list))
    return frozenset(generator.options), generator.takes_settings


def stream_of(
    source: Source,
    kind: Kind,
    *,
    adapter: str,
    columns: Mapping[str, Scalar] | None = None,
    without: Collection[str] = (),
) -> RowStream:
    """Return the rows of a source as contract rows.

    ``columns``: the mapping of the adapter ``columns``. ``without``: columns of prompts that rewards do not see.

    Raises:
        ContractError: unknown adapter, one that cannot make this kind from a file, a malformed mapping.
    """
    found = _adapter(adapter) if adapter != COLUMNS else _declared(columns or {}, kind)
    if found.generators:  # its rows are in contract columns already
        found = ADAPTERS[kind]
    make = _row_function(found, adapter, kind)
    if kind == "prompts":
        extra = extra_columns(columns) if columns and adapter == COLUMNS else None
        make = with_other_columns(make, {*found.spent, *without}, extra, asked=found.spent)
    gather = found.gathers.get(kind)
    return RowStream(source=gather(source) if gather else source, make=make)


def _declared(columns: Mapping[str, Scalar], kind: Kind) -> Adapter:
    try:
        return declared_adapter(Layout(of="", columns={kind: columns}), "rows")
    except ValueError as error:
        raise ContractError(f"the mapping of columns is malformed: {error}", where=COLUMNS) from error


def _adapter(name: str) -> Adapter:
    if ":" in name:
        return _imported(name)
    if name == COLUMNS:
        return Adapter()
    if name not in ADAPTERS:
        close = difflib.get_close_matches(name, ADAPTERS, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"module:NAME, or one of {', '.join(ADAPTERS)}"
        raise ContractError(f"unknown adapter {name!r}", fix=hint)
    return ADAPTERS[name]


def _imported(name: str) -> Adapter:
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (Exception, SystemExit) as error:  # a module may raise anything; a relative name is a TypeError
        raise ContractError(
            f"the adapter {name!r} cannot be imported: {error}", fix="name it as module:NAME, as Python imports it"
        ) from error
    if not isinstance(found, Adapter):
        raise ContractError(f"{name!r} is no adapter", fix="make it a rlcore.data_contracts.adapters.table.Adapter")
    return found


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
        raise ContractError(f"option {name} = {value!r} must be of type {_TYPES[type(option.default)]}")
    if isinstance(value, float) and not option.low <= value <= option.high:
        raise ContractError(f"option {name} = {value!r} must be between {option.low:g} and {option.high:g}")
    return value


def with_other_columns(
    make: RowFn, without: Collection[str], extra: RowFn | None = None, *, asked: Collection[str] = ()
) -> RowFn:
    """Return a function of source rows that adds ``columns`` and ``form``.

    ``columns`` is a JSON object of the columns except ``without``, or ""; ``extra`` adds some to it. ``form`` is
    ``text`` for a question that the source has as a text of one turn, and else ``messages``. ``asked``: its columns,
    without which any conversation in a row counts.
    """
    return partial(_made, make, frozenset(without), extra, tuple(asked))


def _made(
    make: RowFn, without: frozenset[str], extra: RowFn | None, asked: tuple[str, ...], row: Row
) -> list[dict[str, Any]]:
    rows = make(row)
    has_turns = any(is_conversation(row.get(name)) for name in asked or row)
    columns = {name: value for name, value in row.items() if name not in without}
    text = _json({**columns, **(extra(row)[0] if extra else {})})
    return [{**made, "columns": text, "form": _form(made, has_turns)} for made in rows]


def _form(made: Row, has_turns: bool) -> str:
    roles = [turn["role"] for turn in made["messages"]]
    return "messages" if has_turns or len(roles) - roles.count("system") > 1 else "text"


def _json(columns: dict[str, Any]) -> str:
    """Return columns as JSON, without bytes, which it does not have."""
    kept = {name: value for name, value in columns.items() if not isinstance(value, bytes)}
    if not kept:
        return ""
    try:
        text = _dumped(kept)
    except (TypeError, ValueError, RecursionError) as error:
        name = next((name for name, value in kept.items() if not _is_json(value)), next(iter(kept)))
        reason = f"cannot reach the rewards as JSON ({error}); name it in drop_columns"
        raise RowError(name, reason, kept[name]) from error
    if len(text) > MAX_BYTES:
        longest = max(kept, key=lambda name: len(_dumped(kept[name])))
        what = f"the columns that reach rewards have {len(text):,} bytes, at most {MAX_BYTES:,} may"
        raise RowError(longest, f"{what}; {longest!r} is the longest: name it in drop_columns", kept[longest])
    return text.decode()


def _is_json(value: object) -> bool:
    try:
        _dumped(value)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def _dumped(value: object) -> bytes:
    """Return a value as JSON, which Python's encoder writes if it has integers of more than 64 bits."""
    try:
        return orjson.dumps(value, default=_plain)
    except orjson.JSONEncodeError:
        return json.dumps(value, default=_plain, ensure_ascii=False, allow_nan=False).encode()


def _plain(value: object) -> str:
    if isinstance(value, Decimal):
        return str(value)
    raise TypeError(f"a value of type {type(value).__name__}")

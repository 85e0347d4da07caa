"""Columns of a source row that rewards may read: all but the question, as JSON text beside the contract's columns."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from decimal import Decimal
from functools import partial
from typing import Any

import orjson

from rlcore.data_contracts.adapters.conversations import is_conversation
from rlcore.data_contracts.adapters.expressions import Row
from rlcore.data_contracts.errors import RowError

MAX_BYTES = 100_000
RowFn = Callable[[Row], list[dict[str, Any]]]


def with_other_columns(
    make: RowFn, without: Collection[str], extra: RowFn | None = None, *, asked: Collection[str] = ()
) -> RowFn:
    """Return a function of source rows that adds ``columns`` and ``form`` to the rows of ``make``.

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
    """Return columns as JSON; bytes, which it does not have, are left out.

    Raises:
        RowError: they are longer than rewards may read.
    """
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
    """Return a value that JSON does not have as text."""
    if isinstance(value, Decimal):
        return str(value)
    raise TypeError(f"a value of type {type(value).__name__}")

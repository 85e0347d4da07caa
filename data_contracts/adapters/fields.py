"""Readers of one field of a source row. They check its type and never convert; errors name the field."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import Any

from rlcore.data_contracts.adapters.expressions import Number, Row, describe_missing, kind_of
from rlcore.data_contracts.contracts.column_checks import SPLITS
from rlcore.data_contracts.errors import RowError

Messages = list[dict[str, str]]
_LIKE = 0.8  # of difflib: one letter missing, added or swapped in a word of five


def text(row: Row, name: str) -> str:
    """Return the text in field ``name``, which may be empty.

    Raises:
        RowError: missing, or not a text.
    """
    value = _present(row, name)
    if not isinstance(value, str):
        raise RowError(name, f"must be a text, not {kind_of(value)}", value)
    return value


def number(row: Row, name: str) -> float:
    """Return the finite number in field ``name``.

    Raises:
        RowError: missing, not a number (a boolean is none), or not finite.
    """
    value = _present(row, name)
    if isinstance(value, bool) or not isinstance(value, Number):
        raise RowError(name, f"must be a number, not {kind_of(value)}", value)
    try:
        converted = float(value)
    except OverflowError as error:
        raise RowError(name, "is beyond the range of a float", value) from error
    if not math.isfinite(converted):
        raise RowError(name, "must be finite", value)
    return converted


def items(row: Row, name: str) -> list[Any]:
    """Return the list in field ``name``.

    Raises:
        RowError: missing, or not a list.
    """
    value = _present(row, name)
    if not isinstance(value, list):
        raise RowError(name, f"must be a list, not {kind_of(value)}", value)
    return value


def messages(row: Row, name: str = "messages") -> Messages:
    """Return the conversation in field ``name``: objects with ``role`` and ``content``, both texts; null keys are none.

    Raises:
        RowError: naming the message and its field, ``messages.2.role``.
    """
    return [_message(turn, name, place) for place, turn in enumerate(items(row, name))]


def split_of(value: object) -> dict[str, str]:
    """Return the side of a row: ``{"split": "train"}``, or nothing for null.

    Raises:
        RowError: neither ``train`` nor ``eval``.
    """
    if value is None:
        return {}
    if not isinstance(value, str) or value not in SPLITS:
        raise RowError("split", "must be 'train' or 'eval'", value)
    return {"split": value}


def refuse_misspelt(row: Row, names: Collection[str]) -> None:
    """Reject a field that is nearly one of the optional ``names``: its value would be lost silently.

    Raises:
        RowError: naming the field and its probable meaning.
    """
    for field, meant in _misspelt(tuple(row), tuple(names)):
        raise RowError(field, f"is no field of the contract; {meant!r} is: rename it, or leave it out", row[field])


@lru_cache(maxsize=64)
def _misspelt(fields: tuple[str, ...], names: tuple[str, ...]) -> list[tuple[str, str]]:
    """Return the fields that are nearly an absent name, with that name. Most rows have the fields of the row before.

    A name without its ``_id`` is another column: ``prompt`` is a text.
    """
    absent = [name for name in names if name not in fields and name.removesuffix("_id") not in fields]
    found = ((one, difflib.get_close_matches(one.strip().casefold(), absent, n=1, cutoff=_LIKE)) for one in fields)
    return sorted((one, meant[0]) for one, meant in found if meant and one not in names)


def refuse_other_contract(row: Row, contract: str) -> None:
    """Reject a row that declares another contract or version.

    Raises:
        RowError: naming both.
    """
    if "contract" in row and row["contract"] != contract:
        reason = f"the row is of another contract: these rows are read as {contract}"
        raise RowError("contract", reason, row["contract"])


def single_question(question: str) -> Messages:
    """Return a conversation of one question."""
    return [{"role": "user", "content": question}]


def _message(turn: object, field: str, place: int) -> dict[str, str]:
    if type(turn) is dict and len(turn) == 2:  # the common case; the slower path below finds the reason
        role, content = turn.get("role"), turn.get("content")
        if isinstance(role, str) and isinstance(content, str):
            return {"role": role, "content": content}
    path = f"{field}.{place}"
    if not isinstance(turn, Mapping) or {each for each in turn if turn[each] is not None} - {"role", "content"}:
        raise RowError(path, "must be an object with exactly 'role' and 'content'", turn)
    for name in ("role", "content"):
        if name not in turn:
            raise RowError(path, "must be an object with exactly 'role' and 'content'", turn)
        if not isinstance(turn[name], str):
            raise RowError(f"{path}.{name}", f"must be a text, not {kind_of(turn[name])}", turn[name])
    return {"role": turn["role"], "content": turn["content"]}


def _present(row: Row, name: str) -> Any:
    if name not in row:
        raise RowError(name, describe_missing(name, list(row)))
    return row[name]

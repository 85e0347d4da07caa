"""Strict reader of JSON bodies."""

from __future__ import annotations

import json
import math
from typing import Any

from rlcore.errors import shown
from rlcore.openai_api.errors import ApiError

_MAX_DEPTH = 32
_MAX_VALUES = 200_000  # Python needs a second for a few million of them


def read_json(body: bytes) -> dict[str, Any]:
    """Parse a body into an object: UTF-8, unique keys, no NaN, no lone surrogates, limited depth and number of values.

    Raises:
        ApiError: The body is invalid.
    """
    if body.count(b",") + body.count(b"[") + body.count(b"{") > _MAX_VALUES:
        raise _invalid(f"the body has more than {_MAX_VALUES} values")
    try:
        value = json.loads(body.decode("utf-8"), object_pairs_hook=_object, parse_constant=_constant)
    except (ValueError, RecursionError) as error:
        raise _invalid(f"the body is invalid JSON: {shown(str(error).partition(';')[0])}") from None
    if not isinstance(value, dict):
        raise _invalid("the body must be a JSON object")
    _check_plain(value)
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("an object has a duplicate key")
    return found


def _constant(name: str) -> float:
    raise ValueError(f"{name} is no number")


def _check_plain(value: Any) -> None:
    waiting = [(value, 1)]
    while waiting:
        each, depth = waiting.pop()
        if depth > _MAX_DEPTH:
            raise _invalid(f"the body is nested more than {_MAX_DEPTH} levels deep")
        if isinstance(each, float) and not math.isfinite(each):
            raise _invalid("the body has a number that is too large")
        if isinstance(each, str):
            _check_text(each)
        elif isinstance(each, dict):
            waiting += [(inner, depth + 1) for pair in each.items() for inner in pair]
        elif isinstance(each, list):
            waiting += [(inner, depth + 1) for inner in each]


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _invalid("the body has a lone surrogate, which is no character") from None


def _invalid(what: str) -> ApiError:
    return ApiError(400, what, code="invalid_json")

"""Standard JSON, stricter than Python's parser: no NaN, no duplicate keys, bounded depth."""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn

MAX_DEPTH = 32
_SURROGATE = re.compile("[\ud800-\udfff]")


def parse_object(line: bytes) -> dict[str, Any]:
    """Parse one JSON object from UTF-8 bytes.

    Raises:
        ValueError: with the reason: not UTF-8, not JSON, not an object, a duplicate key, NaN or infinity (``1e999``
            included), a lone surrogate, a NUL character, deeper than 32 levels, an integer of thousands of digits.
    """
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: byte 0x{line[error.start]:02x} at position {error.start}") from error
    value = parse_value(text)
    if not isinstance(value, dict):
        raise ValueError(f"a row is a JSON object, and this is {type(value).__name__}")
    return value


def parse_value(text: str) -> Any:
    """Parse JSON of any type.

    Raises:
        ValueError: as of :func:`parse_object`.
    """
    try:
        value = _DECODER.decode(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"malformed JSON: {error.msg} at character {error.pos}") from error
    except RecursionError as error:
        raise ValueError(f"nested deeper than {MAX_DEPTH} levels") from error
    if text.count("{") + text.count("[") > MAX_DEPTH and _is_deep(value, MAX_DEPTH):
        raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
    if "\\u" in text:  # only an escape can encode code points that UTF-8 and JSON reject
        _check_characters(value)
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    built = dict(pairs)
    if len(built) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"duplicate key {next(key for key in keys if keys.count(key) > 1)!r}")
    return built


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is beyond the range of a float")
    return value


def _is_deep(value: object, levels: int) -> bool:
    if not isinstance(value, dict | list):
        return False
    items = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_is_deep(item, levels - 1) for item in items)


def _check_characters(value: object) -> None:
    if isinstance(value, str):
        if "\0" in value:
            raise ValueError("a NUL character")
        if _SURROGATE.search(value):
            raise ValueError("a lone surrogate is no character")
    elif isinstance(value, dict):
        for key, item in value.items():
            _check_characters(key)
            _check_characters(item)
    elif isinstance(value, list):
        for item in value:
            _check_characters(item)


_DECODER = json.JSONDecoder(object_pairs_hook=_unique_keys, parse_constant=_refuse_constant, parse_float=_finite)

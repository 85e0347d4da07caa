"""Origin of a row, and record of a rejected row."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

EXCERPT_CHARACTERS = 200
_PLAIN_NUMBERS = 1e-3, 1e9  # floats between these, and 0, are formatted alike by both encoders
_TEXTS = frozenset({str})
_CANONICAL = json.JSONEncoder(ensure_ascii=False, allow_nan=False, sort_keys=True, separators=(",", ":"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """Location of a row in its source.

    ``line``: line of a JSONL file or row of a table, from 1. ``offset``: bytes before the line (0 for tables and
    generated rows). ``digest``: SHA-256 of the line's bytes without its line end and byte order mark (of its first MB,
    if it is longer; of the row's canonical JSON for tables). ``source``: its number if a dataset has two.
    """

    line: int
    offset: int = 0
    digest: str = ""
    source: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceRow:
    """Row as read, before any adapter. ``split``: the side that its source is for, if any."""

    origin: Origin
    values: Mapping[str, Any]
    split: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Quarantined:
    """Record of a rejected row: enough to find it and see the reason, never the whole row."""

    origin: Origin
    field: str
    excerpt: str
    reason: str

    def to_json(self) -> dict[str, str | int]:
        """Return one line of ``quarantine.jsonl``."""
        return {
            "line": self.origin.line,
            "offset": self.origin.offset,
            "digest": self.origin.digest,
            "source": self.origin.source,
            "field": self.field,
            "excerpt": self.excerpt,
            "reason": self.reason,
        }

    def __str__(self) -> str:
        place = f"{self.origin.source}, " if self.origin.source else ""
        return f"{place}line {self.origin.line}, {self.field or 'row'}: {self.reason} ({self.excerpt!r:.80})"


def excerpt(value: object) -> str:
    """Return at most 200 characters of a value as text; lone surrogates, which no file can store, are replaced."""
    text = value if isinstance(value, str) else repr(value)
    return text[:EXCERPT_CHARACTERS].encode("utf-8", "replace").decode("utf-8")


def canonical_json(value: object) -> bytes:
    """Return the unique JSON text of a value: sorted keys, no blanks, UTF-8.

    Raises:
        ValueError: NaN, infinity, or a lone surrogate.
        TypeError: a value that JSON does not have.
    """
    return _CANONICAL.encode(value).encode("utf-8")


def canonical_row(row: Mapping[str, Any]) -> bytes:
    """Return :func:`canonical_json` of a contract row, in a third of the time for texts and plain numbers."""
    if all(_is_plain(value) for value in row.values() if type(value) is not str):
        try:
            return orjson.dumps(row, option=orjson.OPT_SORT_KEYS)
        except orjson.JSONEncodeError:  # a lone surrogate, an integer of more than 64 bits
            pass
    return canonical_json(row)


def _is_plain(value: object) -> bool:
    """Return True if both encoders certainly format a value, which is no text, alike."""
    if type(value) is float:
        return _PLAIN_NUMBERS[0] <= abs(value) <= _PLAIN_NUMBERS[1] or (value == 0 and math.copysign(1, value) > 0)
    if type(value) is list:
        return all(type(one) is str or (type(one) is dict and {*map(type, one.values())} <= _TEXTS) for one in value)
    return type(value) is int or value is None

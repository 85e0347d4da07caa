"""Origin of a row, and record of a rejected row."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

EXCERPT_CHARACTERS = 200
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
        return {**asdict(self.origin), "field": self.field, "excerpt": self.excerpt, "reason": self.reason}

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

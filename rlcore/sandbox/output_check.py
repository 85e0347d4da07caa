"""Comparison of outputs and values with the expectation of a test, as programming contests do it.

An expected integer requires an equal value, in any spelling. An expected number with a point or an exponent
also accepts values within a tolerance.
"""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

TOLERANCE = 1e-6
_NUMBER = re.compile(r"-?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]{1,4})?")
_INTEGER = re.compile(r"-?[0-9]+")
_MOST_DIGITS = 1_000
_LAYOUT = re.compile(r"^[^\S\n]+\S|\S(?:[^\S\n]{2,}|\t)\S", re.MULTILINE)


def same_text(expected: str, printed: str, tolerance: float | None = None) -> bool:
    """Return True if two outputs have equal words on equal lines, ignoring trailing blanks and empty lines.

    The number of blanks between words matters only if the expected output begins a line with a blank or has several
    consecutive blanks.
    """
    if expected == printed:
        return True
    wanted, found = lines_of(expected), lines_of(printed)
    counts_blanks = _LAYOUT.search(expected) is not None
    return len(wanted) == len(found) and all(
        one == other or _same_line(one, other, tolerance, counts_blanks)
        for one, other in zip(wanted, found, strict=True)
    )


def same_value(expected: Any, value: Any, tolerance: float | None = None) -> bool:
    """Return True if plain data is equal as JSON: a tuple is a list, key 1 is "1", but ``True`` is not 1."""
    if isinstance(expected, bool) or isinstance(value, bool):
        return expected is value
    if isinstance(expected, list):
        return (
            isinstance(value, list | tuple)
            and len(expected) == len(value)
            and all(same_value(one, other, tolerance) for one, other in zip(expected, value, strict=True))
        )
    if isinstance(expected, Mapping):
        named = {_key(name): item for name, item in value.items()} if isinstance(value, dict) else {}
        return (
            isinstance(value, dict)
            and len(named) == len(value)
            and expected.keys() == named.keys()
            and all(same_value(item, named[name], tolerance) for name, item in expected.items())
        )
    if isinstance(expected, int | float) and isinstance(value, int | float):
        return _same_number(expected, value, tolerance)
    return bool(expected == value)


def lines_of(text: str) -> list[str]:
    """Return the lines without trailing blanks, and without empty lines at the end."""
    return [line.rstrip() for line in text.rstrip().splitlines()]


def shown(value: Any) -> str:
    """Return a short form of a value for a message."""
    return _SHORT.repr(value)


def _same_line(expected: str, printed: str, tolerance: float | None, counts_blanks: bool) -> bool:
    wanted, found = expected.split(), printed.split()
    if counts_blanks and re.sub(r"\S+", "x", expected) != re.sub(r"\S+", "x", printed):
        return False
    return len(wanted) == len(found) and all(
        one == other or _same_word(one, other, tolerance) for one, other in zip(wanted, found, strict=True)
    )


def _same_word(expected: str, printed: str, tolerance: float | None) -> bool:
    """Return True if two words are equal numbers. ``007`` is not a number, because it may be a code."""
    if not (_is_number(expected) and _is_number(printed)):
        return False
    wanted, found = Decimal(expected), Decimal(printed)
    is_integer = _INTEGER.fullmatch(expected) is not None
    return wanted == found or _is_near(float(wanted), float(found), _allowed(tolerance, is_integer=is_integer))


def _is_number(word: str) -> bool:
    return len(word) <= _MOST_DIGITS and _NUMBER.fullmatch(word) is not None


def _same_number(expected: float, found: float, tolerance: float | None) -> bool:
    if expected == found or (expected != expected and found != found):  # NaN is NaN here
        return True
    return _is_near(expected, found, _allowed(tolerance, is_integer=isinstance(expected, int)))


def _allowed(tolerance: float | None, *, is_integer: bool) -> float:
    return tolerance if tolerance is not None else 0.0 if is_integer else TOLERANCE


def _is_near(expected: float, found: float, allowed: float) -> bool:
    if not allowed or not _is_finite(expected) or not _is_finite(found):
        return False
    return abs(expected - found) <= allowed * max(1.0, abs(expected))


def _is_finite(number: float) -> bool:
    try:
        return math.isfinite(number)
    except OverflowError:
        return False


def _key(name: Any) -> Any:
    if name is None or isinstance(name, bool):
        return {None: "null", True: "true", False: "false"}[name]
    return str(name) if isinstance(name, int | float) and _is_finite(name) else name


class _Short(reprlib.Repr):
    """``repr``, truncated. Writing an integer of many digits would be slow."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlist = self.maxtuple = self.maxset = self.maxdict = 8
        self.maxstring = self.maxother = self.maxlong = 120

    def repr_int(self, x: int, level: int) -> str:
        return super().repr_int(x, level) if x.bit_length() < 10_000 else f"an integer of {x.bit_length()} bits"


_SHORT = _Short()

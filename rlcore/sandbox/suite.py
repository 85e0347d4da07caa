"""Tests of a code task, and comparison of outputs and values with them, as programming contests do it.

An expected integer requires an equal value, in any spelling. An expected number with a point or an exponent
also accepts values within a tolerance.
"""

from __future__ import annotations

import ast
import json
import math
import re
import reprlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal, get_args

Style = Literal["stdin", "call", "assert"]
_TEXTS = ("entry_point", "prelude", "solution", "checker")
_FIELDS = {"style", "tests", "tolerance", *_TEXTS}


@dataclass(frozen=True, kw_only=True, slots=True)
class Suite:
    """Parsed reference, as :mod:`rlcore.data_contracts.contracts.code_tasks` has it. ``style``: form of ``tests``."""

    style: Style
    tests: tuple[Any, ...]
    entry_point: str = ""
    prelude: str = ""
    solution: str = ""
    checker: str = ""
    tolerance: float | None = None

    def program(self, code: str) -> str:
        """Return the candidate's code after the prelude, whose definitions it may override."""
        return f"{self.prelude}\n{code}" if self.prelude else code


def parse_suite(reference: str) -> Suite:
    """Parse a reference.

    Raises:
        ValueError: It is not a JSON object, has an unknown field, style or form of a test, or no test.
    """
    # int() rejects texts of more than 4,300 digits by default, which tests may contain.
    fields = json.loads(reference, parse_int=lambda digits: int(digits if len(digits) < 4_000 else Decimal(digits)))
    if not isinstance(fields, dict) or not fields.keys() <= _FIELDS:
        raise ValueError(f"a code task must be an object with {', '.join(sorted(_FIELDS))}")
    if fields.get("style") not in get_args(Style):
        raise ValueError(f"style must be one of {', '.join(get_args(Style))}")
    texts = {name: fields.get(name, "") for name in _TEXTS}
    if not all(isinstance(text, str) for text in texts.values()):
        raise ValueError(f"{', '.join(texts)} must be texts")
    if fields["style"] != "stdin" and not texts["entry_point"].isidentifier():
        raise ValueError("entry_point must be the name of a function")
    tests = fields.get("tests")
    if not isinstance(tests, list) or not tests:
        raise ValueError("tests must be a non-empty list")
    for index, test in enumerate(tests):
        if not _is_test(test, fields["style"]):
            raise ValueError(f"tests.{index} is not a test of style {fields['style']}")
    tolerance = fields.get("tolerance")
    if tolerance is not None and not (type(tolerance) in (int, float) and 0 <= tolerance < float("inf")):
        raise ValueError("tolerance must be at least 0")
    if fields["style"] == "assert" and (texts["checker"] or tolerance is not None):
        raise ValueError("assert tests take no checker and no tolerance")
    return Suite(style=fields["style"], tests=tuple(tests), tolerance=tolerance, **texts)


def best_constant(suite: Suite) -> int:
    """Return how many tests the best constant answer passes. Expectations that must be executed count as different."""
    known = Counter(expected for test in suite.tests if (expected := _expected(test, suite.style)))
    return max(known.values(), default=1)


_MOST_ANSWERS, _LONGEST_ANSWER = 3, 8
_NUMBER_OF_SEVERAL = re.compile(r"-?(?!0$|1$)[0-9.]+")


def guess_rate(suite: Suite) -> float:
    """Return the fraction of tests that the commonest answer passes if the order of tests reveals the answers.

    It is 0 if tests expect more than three answers, long answers, only one answer, or a different number each.
    """
    known = Counter(_expected(test, suite.style) for test in suite.tests)
    is_few = 2 <= len(known) <= _MOST_ANSWERS and all(0 < len(one) <= _LONGEST_ANSWER for one in known)
    is_once = len(known) == len(suite.tests) and any(map(_NUMBER_OF_SEVERAL.fullmatch, known))
    return max(known.values()) / len(suite.tests) if is_few and not is_once else 0.0


def _expected(test: Any, style: Style) -> str:
    if style == "stdin":
        return "\n".join(lines_of(test["output"])) or "\n"
    try:
        if style == "call":
            return json.dumps(test["output"], sort_keys=True)
        (statement,) = ast.parse(test).body
        return _asserted(statement.test) if isinstance(statement, ast.Assert) else ""
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ""


def _asserted(condition: ast.expr) -> str:
    match condition:
        case ast.Compare(left=ast.Call(), ops=[ast.Eq() | ast.Is()], comparators=[wanted]):
            return repr(ast.literal_eval(wanted))
        case ast.Compare(left=wanted, ops=[ast.Eq() | ast.Is()], comparators=[ast.Call()]):
            return repr(ast.literal_eval(wanted))
        case ast.Call():
            return "True"
        case ast.UnaryOp(op=ast.Not(), operand=ast.Call()):
            return "False"
    return ""


def _is_test(test: Any, style: Style) -> bool:
    if style == "assert":
        return isinstance(test, str)
    if not isinstance(test, dict):
        return False
    if style == "stdin":
        return test.keys() == {"input", "output"} and all(isinstance(text, str) for text in test.values())
    return (
        {"args", "output"} <= test.keys() <= {"args", "kwargs", "output"}
        and isinstance(test["args"], list)
        and isinstance(test.get("kwargs", {}), dict)
    )


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

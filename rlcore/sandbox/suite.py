"""Tests of a code task: its ``reference``, the JSON object of :mod:`rlcore.data_contracts.contracts.code_tasks`."""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal, get_args

from rlcore.sandbox.output_check import lines_of

Style = Literal["stdin", "call", "assert"]
_TEXTS = ("entry_point", "prelude", "solution", "checker")
_FIELDS = {"style", "tests", "tolerance", *_TEXTS}


@dataclass(frozen=True, kw_only=True, slots=True)
class Suite:
    """Parsed reference. ``style`` is the form of ``tests``."""

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

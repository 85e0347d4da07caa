"""What a program is checked against: the ``reference`` of a code task, and how values and texts are compared.

A reference is a JSON object. ``style`` says what a test is:

    stdin    {"input": "3 4\\n", "output": "7\\n"}: the program is run whole for each test
    call     {"args": [3, 4], "output": 7}: ``entry_point`` is called; ``kwargs`` may be given too
    assert   "assert add(3, 4) == 7": any Python, in which ``entry_point`` and ``candidate`` are the program's function

``tests`` is a list of those. ``prelude`` is code in front of the program and of assertions (imports and helpers that
the prompt gives); ``solution`` is a program that passes. For stdin and call tests there may be:

    tolerance  of numbers: absolute, or relative to the expected one where that is above 1. Without it, 1e-6 where the
               expected number is written with a point or an exponent, and none where it is an integer
    checker    Python that defines check(input, answer, output), true for a right answer to a test: for tasks with
               several. ``input`` is the text or the list ``args``, ``answer`` what was printed or returned
"""

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
    """A parsed reference; ``tests`` are in the form that ``style`` says."""

    style: Style
    tests: tuple[Any, ...]
    entry_point: str = ""
    prelude: str = ""
    solution: str = ""
    checker: str = ""
    tolerance: float | None = None

    def program(self, code: str) -> str:
        """The candidate's code with the prelude in front, where its own definitions win."""
        return f"{self.prelude}\n{code}" if self.prelude else code


def parse_suite(reference: str) -> Suite:
    """The suite of a reference.

    Raises:
        ValueError: no JSON object, an unknown field, style or shape of a test, or no test.
    """
    # int() takes no text of more than 4,300 digits, which a test may well have.
    fields = json.loads(reference, parse_int=lambda digits: int(digits if len(digits) < 4_000 else Decimal(digits)))
    if not isinstance(fields, dict) or not fields.keys() <= _FIELDS:
        raise ValueError(f"a code task is an object with {', '.join(sorted(_FIELDS))}")
    if fields.get("style") not in get_args(Style):
        raise ValueError(f"style must be one of {', '.join(get_args(Style))}")
    texts = {name: fields.get(name, "") for name in _TEXTS}
    if not all(isinstance(text, str) for text in texts.values()):
        raise ValueError(f"{', '.join(texts)} must be texts")
    if fields["style"] != "stdin" and not texts["entry_point"].isidentifier():
        raise ValueError("entry_point must be the name of a function")
    tests = fields.get("tests")
    if not isinstance(tests, list) or not tests:
        raise ValueError("tests must be a list that is not empty")
    for place, test in enumerate(tests):
        if not _is_test(test, fields["style"]):
            raise ValueError(f"tests.{place} is no {fields['style']} test")
    tolerance = fields.get("tolerance")
    if tolerance is not None and not (type(tolerance) in (int, float) and 0 <= tolerance < float("inf")):
        raise ValueError("tolerance must be a number from 0 on")
    if fields["style"] == "assert" and (texts["checker"] or tolerance is not None):
        raise ValueError("assertions compare by themselves: they take no checker and no tolerance")
    return Suite(style=fields["style"], tests=tuple(tests), tolerance=tolerance, **texts)


def best_constant(suite: Suite) -> int:
    """How many tests one and the same answer to all of them passes; what a test expects of itself counts as its own."""
    known = Counter(expected for test in suite.tests if (expected := _expected(test, suite.style)))
    return max(known.values(), default=1)


_MOST_ANSWERS, _LONGEST_ANSWER = 3, 8
_NUMBER_OF_SEVERAL = re.compile(r"-?(?!0$|1$)[0-9.]+")


def answers_by_turns(suite: Suite) -> float:
    """The share of tests that the commonest answer passes, where answers can be guessed by the order of the tests.

    0 where they cannot: tests expect more than three answers, long ones, one and the same, or a number each.
    """
    known = Counter(_expected(test, suite.style) for test in suite.tests)
    is_few = 2 <= len(known) <= _MOST_ANSWERS and all(0 < len(one) <= _LONGEST_ANSWER for one in known)
    is_once = len(known) == len(suite.tests) and any(map(_NUMBER_OF_SEVERAL.fullmatch, known))
    return max(known.values()) / len(suite.tests) if is_few and not is_once else 0.0


def _expected(test: Any, style: Style) -> str:
    """The answer that a test wants, as a text; empty where that takes running it."""
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
    """``f(x) == 3`` wants 3, ``f(x)`` wants True, ``not f(x)`` wants False."""
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

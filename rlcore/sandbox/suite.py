"""What a program is checked against: the ``reference`` of a code task, and how values and texts are compared.

A reference is a JSON object. ``style`` says what a test is:

    stdin    {"input": "3 4\\n", "output": "7\\n"}: the program is run whole for each test
    call     {"args": [3, 4], "output": 7}: ``entry_point`` is called; ``kwargs`` may be given too
    assert   "assert add(3, 4) == 7": any Python, in which ``entry_point`` and ``candidate`` are the program's function

``tests`` is a list of those. ``prelude`` is code in front of the program and of assertions (imports and helpers that
the prompt gives); ``solution`` is a program that passes.
"""

from __future__ import annotations

import ast
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

Style = Literal["stdin", "call", "assert"]
_FIELDS = {"style", "entry_point", "prelude", "tests", "solution"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Suite:
    """A parsed reference; ``tests`` are in the form that ``style`` says."""

    style: Style
    tests: tuple[Any, ...]
    entry_point: str = ""
    prelude: str = ""
    solution: str = ""

    def program(self, code: str) -> str:
        """The candidate's code with the prelude in front, where its own definitions win."""
        return f"{self.prelude}\n{code}" if self.prelude else code


def parse_suite(reference: str) -> Suite:
    """The suite of a reference.

    Raises:
        ValueError: no JSON object, an unknown field, style or shape of a test, or no test.
    """
    fields = json.loads(reference)
    if not isinstance(fields, dict) or not fields.keys() <= _FIELDS:
        raise ValueError(f"a code task is an object with {', '.join(sorted(_FIELDS))}")
    if fields.get("style") not in get_args(Style):
        raise ValueError(f"style must be one of {', '.join(get_args(Style))}")
    texts = {name: fields.get(name, "") for name in ("entry_point", "prelude", "solution")}
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
    return Suite(style=fields["style"], tests=tuple(tests), **texts)


def best_constant(suite: Suite) -> int:
    """How many tests one and the same answer to all of them passes; what a test expects of itself counts as its own."""
    known = Counter(expected for test in suite.tests if (expected := _expected(test, suite.style)))
    return max(known.values(), default=1)


def _expected(test: Any, style: Style) -> str:
    """The answer that a test wants, as a text; empty where that takes running it."""
    if style == "stdin":
        return "\n".join(_lines(test["output"])) or "\n"
    if style == "call":
        return json.dumps(test["output"], sort_keys=True)
    try:
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


def same_text(expected: str, printed: str) -> bool:
    """Whether two outputs are equal but for blanks at the ends of lines and empty lines at the end."""
    return _lines(expected) == _lines(printed)


def same_value(expected: Any, value: Any) -> bool:
    """Whether plain data is what JSON says: ``1 == 1.0`` and a tuple is a list, but ``True`` is not 1."""
    if isinstance(expected, bool) or isinstance(value, bool):
        return expected is value
    if isinstance(expected, list):
        return (
            isinstance(value, list | tuple)
            and len(expected) == len(value)
            and all(same_value(one, other) for one, other in zip(expected, value, strict=True))
        )
    if isinstance(expected, Mapping):
        return (
            isinstance(value, dict)
            and expected.keys() == value.keys()
            and all(same_value(item, value[name]) for name, item in expected.items())
        )
    return bool(expected == value)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]

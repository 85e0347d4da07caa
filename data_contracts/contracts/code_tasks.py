"""``code_tasks/v1``: prompts whose answer is a program, with the tests that it must pass.

The columns are those of ``prompts/v1``. ``reference`` is a JSON object:

    style        "stdin", "call" or "assert"
    entry_point  name of the function that the tests call; not for "stdin"
    prelude      code in front of the program and of assertions (imports and helpers that the prompt gives); optional
    tests        a list, not empty:
                 stdin   {"input": "3 4\\n", "output": "7\\n"}: the whole program runs once for each
                 call    {"args": [3, 4], "output": 7}, with "kwargs" if needed: plain JSON values
                 assert  "assert add(3, 4) == 7": any Python, in which entry_point and ``candidate`` are the function
    tolerance    of numbers in outputs, from 0 on: absolute, or relative to an expected number above 1; without it
                 1e-6 for an expected number with a point or an exponent, and none for an integer; not for "assert"
    checker      Python with ``check(input, answer, output)``, true for a right answer, if a test has several;
                 ``input`` is the text or the list args, ``answer`` what was printed or returned; not for "assert"
    solution     a program that passes; optional: public datasets have tasks without

Another rule of rows is that the solution passes, and neither a stub nor a program that always answers the same does, as
it would with one test, or tests that all expect one output. Running programs needs a sandbox, which the caller provides
(:func:`broken_tests`).
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import islice
from typing import Any

from rlcore.data_contracts.contracts.column_checks import each
from rlcore.data_contracts.contracts.contract import Contract
from rlcore.data_contracts.contracts.datasets import CARRIED, Prompts

_TEXTS = ("style", "entry_point", "prelude", "solution", "checker")
_FORM = (
    "must be JSON of a code task: style 'stdin' with tests {input, output}, or an entry_point and style 'call' with "
    "tests {args, output} or style 'assert' with texts as tests"
)
_MOST_ANSWERS, _LONGEST_ANSWER = 4, 100_000  # that are tried as constant ones; characters
_TEST_FIELDS = {"stdin": ({"input", "output"}, set[str]()), "call": ({"args", "output"}, {"kwargs"})}


class CodeTasks(Prompts):
    """One row per task."""

    class Config:
        strict = True
        name = "code_tasks/v1"

    reference_is_a_code_task = each(lambda text: is_code_task(text), "reference", error=_FORM)


CONTRACT = Contract(name="code_tasks/v1", model=CodeTasks, id_column="prompt_id", carried=CARRIED)


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """Program to run against the tests of a row, True if it must pass, and the fault of the row if it does not."""

    row: int
    reference: str
    code: str
    must_pass: bool
    fault: str


def broken_tests(references: Sequence[str], failures: Callable[[Sequence[Trial]], Sequence[str]]) -> dict[int, str]:
    """Return the rows whose tests are wrong, with the reason: the solution fails, or a trivial program passes.

    ``failures`` runs programs and returns for each the first failed test and its result, or "" if it passed all. A
    reference that is no code task does not run: the contract rejects it.
    """
    tasks = {row: task for row, text in enumerate(references) if (task := _code_task(text)) is not None}
    trials = [
        Trial(row=row, reference=references[row], code=code, must_pass=must_pass, fault=fault)
        for row, task in tasks.items()
        for code, must_pass, fault in _programs(task)
        if code.strip()
    ]
    reasons: dict[int, str] = {}
    for trial, failure in zip(trials, failures(trials), strict=True):
        if trial.must_pass == bool(failure):
            reasons.setdefault(trial.row, f"{trial.fault}: {failure}" if failure else trial.fault)
    return reasons


def _programs(task: dict[str, Any]) -> Iterator[tuple[str, bool, str]]:
    yield stub(task), False, "a program that does nothing passes its tests"
    yield task.get("solution", ""), True, "its solution does not pass its tests"
    count = len(task["tests"])
    tests = f"{count} test{'s' * (count > 1)}"
    for answer in islice(_first_answers(task), _MOST_ANSWERS):
        if len(answer) <= _LONGEST_ANSWER:
            fault = f"a program that always answers the same passes its tests: {answer:.80}, {tests}"
            yield _constant(task, answer), False, fault


def _constant(task: dict[str, Any], answer: str) -> str:
    if task["style"] == "stdin":
        return f"print({answer})\n"
    return f"def {task['entry_point']}(*args, **kwargs):\n    return {answer}\n"


def _first_answers(task: dict[str, Any]) -> Iterator[str]:
    first = task["tests"][0]
    try:
        yield from _asserted(task) if task["style"] == "assert" else (repr(first["output"]),)
    except (ValueError, SyntaxError, RecursionError, MemoryError):  # an integer too long to be written; no Python
        return


def _asserted(task: dict[str, Any]) -> Iterator[str]:
    names = {task["entry_point"], "candidate"}
    nodes = (node for test in task["tests"] for node in ast.walk(ast.parse(test)))
    first = next((node for node in nodes if isinstance(node, ast.Assert) and _calls(node, names)), None)
    if first is None:
        return
    sides = [side for node in ast.walk(first.test) if isinstance(node, ast.Compare) for side in _sides_of(node)]
    literals = [ast.unparse(side) for side in sides if not _calls(side, names) and _is_literal(side)]
    yield from dict.fromkeys([*literals, "True", "False"])


def _sides_of(node: ast.Compare) -> list[ast.expr]:
    return [node.left, *node.comparators]


def _calls(node: ast.AST, names: Collection[str]) -> bool:
    return any(
        isinstance(each, ast.Call) and isinstance(each.func, ast.Name) and each.func.id in names
        for each in ast.walk(node)
    )


def _is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError, RecursionError, MemoryError):
        return False
    return True


def stub(task: dict[str, Any]) -> str:
    """Return a program that does nothing: a function that returns None, or an empty script."""
    return f"def {task['entry_point']}(*args, **kwargs):\n    pass\n" if task["style"] != "stdin" else "pass\n"


def is_code_task(text: str) -> bool:
    """Return True if a text is the JSON of a code task."""
    return _code_task(text) is not None


def _code_task(text: str) -> dict[str, Any] | None:
    try:  # int() accepts at most 4,300 digits, which a test may exceed
        task = json.loads(text, parse_int=lambda digits: int(digits if len(digits) < 4_000 else Decimal(digits)))
    except (ValueError, RecursionError):
        return None
    return task if isinstance(task, dict) and _is_sound(task) else None


def _is_sound(task: dict[str, Any]) -> bool:
    if not task.keys() <= {*_TEXTS, "tests", "tolerance"}:
        return False
    if not all(isinstance(task.get(name, ""), str) for name in _TEXTS) or not _is_tolerance(task.get("tolerance", 0)):
        return False
    if not task.get("solution", "none").strip():
        return False
    style, tests = task.get("style"), task.get("tests")
    if style != "stdin" and not task.get("entry_point", "").isidentifier():
        return False
    if style == "assert" and (task.get("checker") or "tolerance" in task):
        return False
    return isinstance(tests, list) and bool(tests) and all(_is_test(test, style) for test in tests)


def _is_tolerance(value: object) -> bool:
    return type(value) in (int, float) and 0 <= value < float("inf")  # type: ignore[operator]  # one of the two


def _is_test(test: object, style: object) -> bool:
    if style == "assert":
        return isinstance(test, str)
    if style not in _TEST_FIELDS or not isinstance(test, dict):
        return False
    required, optional = _TEST_FIELDS[str(style)]
    if not required <= test.keys() <= required | optional:
        return False
    if style == "stdin":
        return all(isinstance(value, str) for value in test.values())
    return isinstance(test["args"], list) and isinstance(test.get("kwargs", {}), dict)

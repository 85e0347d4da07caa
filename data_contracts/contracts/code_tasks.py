"""``code_tasks/v1``: prompts whose answer is a program, with the tests that it must pass.

The columns are those of ``prompts/v1``. ``reference`` is a JSON object:

    style        "stdin", "call" or "assert"
    entry_point  name of the function that the tests call; not for "stdin"
    prelude      code in front of the program and of assertions (imports and helpers that the prompt gives); optional
    tests        a list, not empty:
                 stdin   {"input": "3 4\\n", "output": "7\\n"}: the whole program runs once for each
                 call    {"args": [3, 4], "output": 7}, with "kwargs" if needed: plain JSON values
                 assert  "assert add(3, 4) == 7": any Python, in which entry_point and ``candidate`` are the function
    tolerance    of numbers in outputs, from 0 on; without it 1e-6 for an expected number with a point or an exponent,
                 and none for an integer; not for "assert"
    checker      Python with ``check(input, answer, output)``, true for a right answer, if a test has several;
                 ``input`` is the text or the list args, ``answer`` what was printed or returned; not for "assert"
    solution     a program that passes; optional: public datasets have tasks without

Another rule of rows is that the solution passes, and neither a stub nor a constant answer does. Running programs needs
a sandbox, which the caller provides (:func:`broken_tests`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import pandas as pd
import pandera.pandas as pa

from rlcore.data_contracts.contracts.contract import Contract
from rlcore.data_contracts.contracts.prompts import CARRIED, Prompts

_TEXTS = ("style", "entry_point", "prelude", "solution", "checker")
_FORM = (
    "must be JSON of a code task: style 'stdin' with tests {input, output}, or an entry_point and style 'call' with "
    "tests {args, output} or style 'assert' with texts as tests"
)
_CHOICE = re.compile(r"[A-Za-z]{1,10}")
_TEST_FIELDS = {"stdin": ({"input", "output"}, set[str]()), "call": ({"args", "output"}, {"kwargs"})}


class CodeTasks(Prompts):
    """One row per task."""

    class Config:
        strict = True
        name = "code_tasks/v1"

    @pa.check("reference", error=_FORM)
    @classmethod
    def reference_is_a_code_task(cls, texts: pd.Series) -> pd.Series:
        return texts.map(is_code_task).astype(bool)


CONTRACT = Contract(name="code_tasks/v1", model=CodeTasks, id_column="prompt_id", carried=CARRIED)


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """Program to run against the tests of a row, and True if it must pass."""

    row: int
    reference: str
    code: str
    must_pass: bool


def broken_tests(references: Sequence[str], failures: Callable[[Sequence[Trial]], Sequence[str]]) -> dict[int, str]:
    """Return the rows whose tests are wrong, with the reason: the solution fails, or a trivial program passes.

    ``failures`` runs programs and returns for each the first failed test and its result, or "" if it passed all. A
    reference that is no code task does not run: the contract rejects it.
    """
    tasks = {row: task for row, text in enumerate(references) if (task := _code_task(text)) is not None}
    trials = [
        Trial(row=row, reference=references[row], code=code, must_pass=must_pass)
        for row, task in tasks.items()
        for code, must_pass in ((task.get("solution", ""), True), (stub(task), False))
        if code.strip()
    ]
    reasons = {row: reason for row, task in tasks.items() if (reason := _guessable(task))}
    for trial, failure in zip(trials, failures(trials), strict=True):
        if trial.must_pass and failure:
            reasons[trial.row] = f"its solution does not pass its tests: {failure}"
        elif not trial.must_pass and not failure:
            reasons[trial.row] = "a program that does nothing passes its tests"
    return reasons


def _guessable(task: dict[str, Any]) -> str:
    """Return the reason why a program that ignores its input passes: several tests all expect the same boolean."""
    tests = task["tests"]
    if task["style"] == "assert" or task.get("checker") or len(tests) < 2:
        return ""
    first, *rest = [str(test["output"]).strip() if _is_choice(test["output"]) else None for test in tests]
    if first is None or any(other != first for other in rest):
        return ""
    return f"one and the same answer passes all its tests: {first}, {len(tests)} times"


def _is_choice(output: object) -> bool:
    if isinstance(output, str):
        return _CHOICE.fullmatch(output.strip()) is not None
    return output is None or isinstance(output, bool)


def stub(task: dict[str, Any]) -> str:
    """Return a program that does nothing: a function that returns None, or an empty script."""
    return f"def {task['entry_point']}(*args, **kwargs):\n    pass\n" if task["style"] != "stdin" else "pass\n"


def is_code_task(text: str) -> bool:
    """Return True if a text is the JSON of a code task."""
    return _code_task(text) is not None


def _code_task(text: str) -> dict[str, Any] | None:
    """Parse a reference into a code task; None if it is none."""
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

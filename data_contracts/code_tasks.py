"""``code_tasks/v1``: prompts whose answer is a program, with the tests that it has to pass.

The columns are those of ``prompts/v1``. ``reference`` is a JSON object:

    style        "stdin", "call" or "assert"
    entry_point  name of the function that the tests call; not for "stdin"
    prelude      code in front of the program and of assertions (imports and helpers that the prompt gives); optional
    tests        a list, not empty:
                 stdin   {"input": "3 4\\n", "output": "7\\n"}: the whole program runs once for each
                 call    {"args": [3, 4], "output": 7}, with "kwargs" if needed: plain JSON values
                 assert  "assert add(3, 4) == 7": any Python, in which entry_point and ``candidate`` are the function
    solution     a program that passes

That the solution passes and a stub fails is a rule of rows too, but to run programs takes a sandbox: the caller brings
one (:func:`broken_tests`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import pandera.pandas as pa

from data_contracts.contract import Contract
from data_contracts.prompts import Prompts

_TEXTS = ("style", "entry_point", "prelude", "solution")
_TEST_FIELDS = {"stdin": ({"input", "output"}, set[str]()), "call": ({"args", "output"}, {"kwargs"})}


class CodeTasks(Prompts):
    """One row per task."""

    class Config:
        strict = True
        name = "code_tasks/v1"

    @pa.check("reference", error="must be a code task with a style, tests of that style and a solution")
    @classmethod
    def reference_is_a_code_task(cls, texts: pd.Series) -> pd.Series:
        return texts.map(_is_code_task).astype(bool)


CONTRACT = Contract(name="code_tasks/v1", model=CodeTasks, id_column="prompt_id")


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """A program to be run against the tests of a row, and whether it has to pass."""

    row: int
    reference: str
    code: str
    must_pass: bool


def broken_tests(references: Sequence[str], passes: Callable[[Sequence[Trial]], Sequence[bool]]) -> dict[int, str]:
    """The rows whose tests judge wrongly, with the reason: the solution does not pass, or a stub does.

    ``passes`` runs programs and says of each whether it passed all tests of its row. A reference that is no code task
    is not run: the contract refuses it.
    """
    tasks = {row: json.loads(text) for row, text in enumerate(references) if _is_code_task(text)}
    trials = [
        Trial(row=row, reference=references[row], code=code, must_pass=must_pass)
        for row, task in tasks.items()
        for code, must_pass in ((task["solution"], True), (stub(task), False))
    ]
    verdicts = zip(trials, passes(trials), strict=True)
    reasons = {True: "its solution does not pass its tests", False: "a program that does nothing passes its tests"}
    return {trial.row: reasons[trial.must_pass] for trial, passed in verdicts if passed is not trial.must_pass}


def stub(task: dict[str, Any]) -> str:
    """The program that does nothing: a function that returns None, or an empty script."""
    return f"def {task['entry_point']}(*args, **kwargs):\n    pass\n" if task["style"] != "stdin" else "pass\n"


def _is_code_task(text: str) -> bool:
    try:
        task = json.loads(text)
    except (ValueError, RecursionError):
        return False
    if not isinstance(task, dict) or not task.keys() <= {*_TEXTS, "tests"}:
        return False
    if not all(isinstance(task.get(name, ""), str) for name in _TEXTS) or not task.get("solution", "").strip():
        return False
    style, tests = task.get("style"), task.get("tests")
    if style != "stdin" and not task.get("entry_point", "").isidentifier():
        return False
    return isinstance(tests, list) and bool(tests) and all(_is_test(test, style) for test in tests)


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

"""Code tasks have to be well-formed, and their tests have to tell a solution from a stub."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pandas as pd
import pytest

from data_contracts.code_tasks import CONTRACT, Trial, broken_tests, stub
from data_contracts.contract import complaints

CALL = {
    "style": "call",
    "entry_point": "add",
    "tests": [{"args": [1, 2], "output": 3}],
    "solution": "def add(a, b): return a + b",
}
STDIN = {"style": "stdin", "tests": [{"input": "1\n", "output": "1\n"}], "solution": "print(input())"}
ASSERT = {**CALL, "style": "assert", "tests": ["assert add(1, 2) == 3"], "prelude": "import math"}


def reasons(reference: Any) -> list[str]:
    text = reference if isinstance(reference, str) else json.dumps(reference)
    question = [{"role": "user", "content": "Add."}]
    row = {"prompt_id": "1", "messages": question, "reference": text, "task": "code", "split": "train"}
    return [one.reason for one in complaints(pd.DataFrame([row]), CONTRACT)]


@pytest.mark.parametrize("task", [CALL, STDIN, ASSERT, {**CALL, "tests": [{"args": [], "kwargs": {}, "output": None}]}])
def test_a_task_of_each_style_fulfils_the_contract(task: dict[str, Any]) -> None:
    assert reasons(task) == []


@pytest.mark.parametrize(
    "task",
    [
        "",
        "7",
        "[]",
        "[" * 100_000,
        {**CALL, "style": "junit"},
        {**CALL, "style": ["call"]},
        {**CALL, "entry_point": ""},
        {**CALL, "entry_point": "a.b"},
        {**CALL, "tests": []},
        {**CALL, "tests": "assert"},
        {**CALL, "tests": [{"args": [1]}]},
        {**CALL, "tests": [{"args": 1, "output": 1}]},
        {**CALL, "tests": [{"args": [], "output": 1, "timeout": 1}]},
        {**CALL, "solution": ""},
        {**CALL, "solution": 3},
        {**CALL, "hidden": 1},
        {**STDIN, "tests": [{"input": 1, "output": "1"}]},
        {**ASSERT, "tests": [1]},
        {name: value for name, value in CALL.items() if name != "solution"},
    ],
)
def test_a_malformed_task_is_refused(task: Any) -> None:
    assert reasons(task) == ["must be a code task with a style, tests of that style and a solution"]


def test_the_columns_of_prompts_are_checked_too() -> None:
    row = {"prompt_id": " ", "messages": [], "reference": json.dumps(CALL), "task": "code", "split": "train"}
    assert len(complaints(pd.DataFrame([row]), CONTRACT)) == 2


def test_a_row_whose_solution_fails_or_whose_stub_passes_is_named() -> None:
    weak = {**CALL, "tests": [{"args": [], "output": None}]}
    wrong = {**CALL, "solution": "wrong"}
    references = [json.dumps(CALL), json.dumps(weak), json.dumps(wrong), "no task"]

    def passes(trials: Sequence[Trial]) -> list[bool]:
        assert [trial.row for trial in trials] == [0, 0, 1, 1, 2, 2]
        return [trial.code == CALL["solution"] or (trial.row == 1) for trial in trials]

    assert broken_tests(references, passes) == {
        1: "a program that does nothing passes its tests",
        2: "its solution does not pass its tests",
    }


def test_a_stub_defines_the_function_and_does_nothing() -> None:
    assert stub(CALL) == "def add(*args, **kwargs):\n    pass\n"
    assert stub(STDIN) == "pass\n"

"""Code tasks have to be well-formed, and their tests have to tell a solution from a stub."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pandas as pd
import pytest

from rlcore.data_contracts.contracts.code_tasks import CONTRACT, Trial, broken_tests, stub
from rlcore.data_contracts.contracts.contract import violations

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
    return [one.reason for one in violations(pd.DataFrame([row]), CONTRACT)]


@pytest.mark.parametrize(
    "task",
    [
        CALL,
        STDIN,
        ASSERT,
        {**CALL, "tests": [{"args": [], "kwargs": {}, "output": None}]},
        {**CALL, "tolerance": 0},
        {**STDIN, "tolerance": 1e-9, "checker": "def check(*a): return True"},
        {name: value for name, value in CALL.items() if name != "solution"},
        json.dumps(CALL).replace('"output": 3', '"output": ' + "3" * 5_000),
    ],
)
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
        {**CALL, "solution": " "},
        {**CALL, "solution": 3},
        {**CALL, "tolerance": -1},
        {**CALL, "tolerance": True},
        {**CALL, "tolerance": None},
        {**CALL, "checker": 1},
        {**ASSERT, "checker": "def check(*a): return True"},
        {**ASSERT, "tolerance": 0.1},
        {**CALL, "hidden": 1},
        {**STDIN, "tests": [{"input": 1, "output": "1"}]},
        {**ASSERT, "tests": [1]},
    ],
)
def test_a_malformed_task_is_refused(task: Any) -> None:
    (reason,) = reasons(task)
    assert reason.startswith("must be JSON of a code task: style 'stdin' with tests {input, output}, or an entry_point")


def test_the_columns_of_prompts_are_checked_too() -> None:
    row = {"prompt_id": " ", "messages": [], "reference": json.dumps(CALL), "task": "code", "split": "train"}
    assert len(violations(pd.DataFrame([row]), CONTRACT)) == 2


def test_a_row_whose_solution_fails_or_whose_stub_passes_is_named() -> None:
    weak = {**CALL, "tests": [{"args": [], "output": None}]}
    wrong = {**CALL, "solution": "wrong"}
    bare = {name: value for name, value in CALL.items() if name != "solution"}
    references = [json.dumps(CALL), json.dumps(weak), json.dumps(wrong), json.dumps(bare), "no task"]

    def failures(trials: Sequence[Trial]) -> list[str]:
        assert [trial.row for trial in trials] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3]
        return ["" if trial.code == CALL["solution"] or trial.row == 1 else "test 1 of 1: no" for trial in trials]

    assert broken_tests(references, failures) == {
        1: "a program that does nothing passes its tests",
        2: "its solution does not pass its tests: test 1 of 1: no",
    }


ADD = "def add(*args, **kwargs):\n    return "


@pytest.mark.parametrize(
    ("task", "programs"),
    [
        (CALL, [f"{ADD}3\n"]),
        ({**CALL, "tests": [{"args": [], "output": {"a": [None, True, "b"]}}]}, [f"{ADD}{{'a': [None, True, 'b']}}\n"]),
        (STDIN, ["print('1\\n')\n"]),
        (ASSERT, [f"{ADD}{answer}\n" for answer in ("3", "True", "False")]),
        (
            {
                **ASSERT,
                "tests": ["x = 1", "def check(candidate):\n    assert abs(candidate(1) - 3) < 1e-6\ncheck(add)"],
            },
            [f"{ADD}{answer}\n" for answer in ("1e-06", "True", "False")],
        ),
        (
            {**ASSERT, "tests": ["assert [1, 2] == add(2)", "assert add(3) == 4"]},
            [f"{ADD}{answer}\n" for answer in ("[1, 2]", "True", "False")],
        ),
        ({**ASSERT, "tests": ["no python ("]}, []),
        (json.loads(json.dumps(CALL).replace('"output": 3', '"output": ' + "3" * 4_000)), [f"{ADD}{'3' * 4_000}\n"]),
    ],
)
def test_a_program_that_always_gives_the_first_answer_is_tried(task: dict[str, Any], programs: list[str]) -> None:
    seen: list[Trial] = []

    def failures(trials: Sequence[Trial]) -> list[str]:
        seen.extend(trials)
        return ["" if trial.must_pass or "always" in trial.fault else "no" for trial in trials]

    found = broken_tests([json.dumps(task)], failures)
    assert [trial.code for trial in seen if "always" in trial.fault] == programs
    assert [reason.startswith("a program that always answers the same passes") for reason in found.values()] == [
        True
    ] * bool(programs)


def test_a_stub_defines_the_function_and_does_nothing() -> None:
    assert stub(CALL) == "def add(*args, **kwargs):\n    pass\n"
    assert stub(STDIN) == "pass\n"

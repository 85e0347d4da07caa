"""Code tasks are well-formed, and their tests tell a solution from a stub; LiveCodeBench's rows become such tasks."""

from __future__ import annotations

import base64
import json
import pickle
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from rlcore.data_contracts.adapters.code_sets import livecodebench_prompts
from rlcore.data_contracts.contracts.code_tasks import CONTRACT, Trial, broken_tests, stub
from rlcore.data_contracts.contracts.contract import violations
from rlcore.data_contracts.errors import RowError

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


def made_tests(kind: str, *pairs: tuple[str, str]) -> str:
    return json.dumps([{"input": given, "output": wanted, "testtype": kind} for given, wanted in pairs])


def packed(value: Any) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(value))).decode()


SCRIPT = {
    "question_id": "abc1_a",
    "question_content": "Double the number.",
    "starter_code": "",
    "public_test_cases": made_tests("stdin", ("3\n", "6\n")),
    "private_test_cases": packed(made_tests("stdin", ("50\n", "100\n"), ("7\n", "14\n"))),
    "metadata": "{}",
}
METHOD = {
    **SCRIPT,
    "starter_code": "class Solution:\n    def pick(self, a: List[int], k: int) -> int:\n        ",
    "public_test_cases": made_tests("functional", ("[4, 5]\n1", "5")),
    "private_test_cases": made_tests("functional", ("[8]\n0", "8")),
    "metadata": json.dumps({"func_name": "pick"}),
}


def test_a_script_is_run_with_all_its_tests() -> None:
    (row,) = livecodebench_prompts(SCRIPT)
    tests = [{"input": f"{n}\n", "output": f"{2 * n}\n"} for n in (3, 50, 7)]
    assert json.loads(row["reference"]) == {"style": "stdin", "tests": tests}
    assert row["messages"][0]["content"].endswith("Double the number.")
    assert row["prompt_id"] == "abc1_a"


def test_a_method_is_called_with_an_argument_a_line() -> None:
    (row,) = livecodebench_prompts(METHOD)
    tests = [{"args": [[4, 5], 1], "output": 5}, {"args": [[8], 0], "output": 8}]
    assert json.loads(row["reference"]) == {"style": "call", "entry_point": "pick", "tests": tests}
    assert "class Solution:" in row["messages"][0]["content"]


@pytest.mark.parametrize("source", [SCRIPT, METHOD])
def test_such_a_row_fulfils_the_contract_without_a_solution(source: dict[str, Any]) -> None:
    rows = [{**row, "split": "train"} for row in livecodebench_prompts(source)]
    assert violations(pd.DataFrame(rows), CONTRACT) == []


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (open, (str(self.path), "w"))


def test_a_pickle_of_anything_but_a_text_is_refused_and_not_run(tmp_path: Path) -> None:
    mark = tmp_path / "owned"
    for value in (Evil(mark), ["[]"], b"[]", 7, ("[]", "[]")):
        with pytest.raises(RowError, match="has no tests"):
            livecodebench_prompts({**SCRIPT, "private_test_cases": packed(value)})
    assert not mark.exists()


@pytest.mark.parametrize(
    "change",
    [
        {"private_test_cases": "no base64!"},
        {"private_test_cases": base64.b64encode(b"no zlib").decode()},
        {"private_test_cases": packed("[" * 9)},
        {"private_test_cases": "[7]"},
        {"private_test_cases": '[{"input": 7, "output": "14"}]'},
        {"private_test_cases": base64.b64encode(zlib.compress(b"\0" * (65 << 20))).decode()},
        {"private_test_cases": METHOD["private_test_cases"]},  # of both kinds
        {"public_test_cases": "[]", "private_test_cases": "[]"},
    ],
)
def test_a_row_without_sound_tests_is_refused(change: dict[str, str]) -> None:
    with pytest.raises(RowError):
        livecodebench_prompts({**SCRIPT, **change})


@pytest.mark.parametrize(
    "change", [{"metadata": "{}"}, {"metadata": "x"}, {"public_test_cases": made_tests("functional", ("a", "1"))}]
)
def test_a_method_without_its_name_or_with_other_tests_is_refused(change: dict[str, str]) -> None:
    with pytest.raises(RowError):
        livecodebench_prompts({**METHOD, **change})

"""LiveCodeBench's rows become code tasks without a solution, and nothing of them is unpickled."""

from __future__ import annotations

import base64
import json
import pickle
import zlib
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from rlcore.data_contracts.adapters.livecodebench import livecodebench_prompts
from rlcore.data_contracts.contracts.code_tasks import CONTRACT
from rlcore.data_contracts.contracts.contract import violations
from rlcore.data_contracts.errors import RowError


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

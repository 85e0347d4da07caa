"""A code task reaches training only when its tests were seen to work, in the sandbox."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlcore.data_contracts.adapters.code_sets import COLUMNS
from rlcore.data_contracts.adapters.table import ADAPTERS
from rlcore.tasks.presets.data import DatasetConfig
from rlcore.tasks.steps.code_tasks import test_suite_filter as suite_filter
from rlcore.tasks.steps.data import prepare_dataset
from rlcore.tasks.steps.rows import read_prompts
from tests.data_contracts.adapters.test_table import ROWS
from tests.rlcore.sandbox.conftest import require_bubblewrap
from tests.tasks.steps.token_views import words_view


def task(number: int, **changes: Any) -> dict[str, Any]:
    reference = {
        "style": "call",
        "entry_point": "add",
        "tests": [{"args": [1, each], "output": 1 + each} for each in (number, number + 1)],
        "solution": "def add(a, b): return a + b",
    }
    question = [{"role": "user", "content": f"Add {number}."}]
    return {
        "prompt_id": str(number),
        "messages": question,
        "reference": json.dumps({**reference, **changes}),
        "task": "code",
    }


def test_rows_whose_tests_do_not_work_are_quarantined_with_the_reason(tmp_path: Path) -> None:
    require_bubblewrap()
    weak = [{"args": [1, 5], "output": None}]
    unfit = {"style": "assert", "tests": ["assert add(lambda: 1, 2)"]}  # a function is no plain data
    rows = [task(n) for n in range(4)]
    rows += [task(4, solution="def add(a, b): return a"), task(5, tests=weak), task(6, **unfit)]
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DatasetConfig(
        contract="code_tasks",
        adapter="code_tasks",
        path=str(path),
        num_train=3,
        num_eval=1,
        max_tokens=64,
        max_quarantined=0.5,
    )
    folder = tmp_path / "snapshot"
    folder.mkdir()
    report = prepare_dataset("prompts", config, seed=0, tokens=words_view(4), folder=folder)
    assert (report.contract, report.accepted, report.quarantined) == ("code_tasks/v1", 4, 3)
    assert report.reasons == {
        "its solution does not pass its tests": 2,
        "a program that does nothing passes its tests": 1,
    }
    assert len(read_prompts(folder / "train.parquet")) == 3
    refused = {row["line"]: row for row in map(json.loads, (folder / "quarantine.jsonl").read_text().splitlines())}
    assert refused[5]["excerpt"] == "test 1 of 2, args [1, 4]: returned 1, expected 5"
    assert refused[7]["excerpt"].startswith("test 1 of 1, assert add(lambda: 1, 2): the tests cannot be run:")


ONE = [{"args": [1, 5], "output": 6}]
ALIKE = [{"args": [1, 5], "output": 6}, {"args": [2, 4], "output": 6}]
SPELT = [{"input": "1 5", "output": "6.0\n"}, {"input": "2 4", "output": "6.00"}]
ADDED = "print(float(sum(map(int, input().split()))))"
CHECKER = "def check(input, answer, output): return float(answer) == float(output)"
ALWAYS = "a program that always answers the same passes its tests"


CONSTANT: list[tuple[dict[str, Any], str]] = [
    ({"tests": ONE}, f"{ALWAYS}: 6, 1 test"),
    ({"tests": ALIKE}, f"{ALWAYS}: 6, 2 tests"),
    ({"style": "stdin", "tests": SPELT, "solution": ADDED}, f"{ALWAYS}: '6.0\\n', 2 tests"),
    ({"style": "stdin", "tests": SPELT, "solution": ADDED, "checker": CHECKER}, f"{ALWAYS}: '6.0\\n', 2 tests"),
    ({"style": "assert", "tests": ["assert add(1, 5) == 6"]}, f"{ALWAYS}: 6, 1 test"),
    ({"style": "assert", "tests": ["assert add(1, 5) == 6", "assert 6 == add(2, 4)"]}, f"{ALWAYS}: 6, 2 tests"),
    ({"style": "assert", "tests": ["assert add(1, 5)"]}, f"{ALWAYS}: True, 1 test"),
    ({"style": "assert", "tests": ["for n in (1, 2):\n    assert candidate(1, n) == 1 + n"]}, ""),
    ({"style": "assert", "tests": ["assert add(1, 5) == 6", "assert add(1, 2) == 3"]}, ""),
    ({}, ""),
]


def test_a_program_that_always_answers_the_same_must_fail() -> None:
    require_bubblewrap()
    with suite_filter() as screen:
        found = screen([task(2, **fields)["reference"] for fields, _ in CONSTANT])
    assert [found.get(place, "") for place in range(len(CONSTANT))] == [reason for _, reason in CONSTANT]


def test_rows_of_public_sets_are_tasks_whose_solutions_pass() -> None:
    require_bubblewrap()
    script = {"question": "Double.", "input_output": json.dumps({"inputs": ["1\n", "2\n"], "outputs": ["2\n", "4\n"]})}
    found = [(name, ROWS[name]) for name in COLUMNS] + [
        ("apps", {**script, "solutions": '["print(2*int(input()))"]'}),
        ("apps", {**ROWS["apps"], "solutions": ["def f(x): return 2 * x"]}),
    ]
    tasks = [ADAPTERS[name].rows["prompts"](row)[0]["reference"] for name, row in found]
    with suite_filter() as screen:
        assert screen(tasks) == {}
        assert [*screen([each.replace("2 *", "3 *").replace("2*", "3*") for each in tasks])] == [2, 3, 4, 5]


# Solutions as public datasets have them, each with the reason against it: programs that graders elsewhere reject pass.
SOLUTIONS = {
    "open(0)": ({"style": "stdin", "solution": "print(2 * int(open(0).read()))"}, ""),
    "a type of typing": ({"solution": "def add(a: Optional[int], b: List[int]):\n    return a + b"}, ""),
    "class Solution": ({"solution": "class Solution:\n    def add(self, a, b):\n        return a + b"}, ""),
    "a digit": ({"style": "stdin", "solution": "print(int(input()) * 2 + 1e-9)"}, ""),
    "another number": (
        {"style": "stdin", "solution": "print(3 * int(input()))"},
        "test 1 of 2, input '3': printed '9\\n', expected '6.0'",
    ),
    "an assertion": (
        {
            "style": "assert",
            "tests": ["assert add(2, 2) == 4", "assert add(3, 4) == 7"],
            "solution": "def add(a, b): return 4",
        },
        "test 2 of 2, assert add(3, 4) == 7: AssertionError",
    ),
    "a library": (
        {"style": "stdin", "solution": "import nowhere\nprint(2 * int(input()))"},
        "test 1 of 2, input '3': ModuleNotFoundError: No module named 'nowhere' (line 1)",
    ),
}


@pytest.mark.parametrize("name", SOLUTIONS)
def test_a_rejected_solution_names_the_test_what_it_gave_and_what_was_expected(name: str) -> None:
    require_bubblewrap()
    fields, expected = SOLUTIONS[name]
    if fields.get("style") == "stdin":
        fields = {**fields, "tests": [{"input": "3", "output": "6.0"}, {"input": "4", "output": "8.0"}]}
    with suite_filter() as screen:
        found = screen([task(2, **fields)["reference"]])
    assert found.get(0, "").removeprefix("its solution does not pass its tests: ").startswith(expected)
    assert bool(found) == bool(expected)

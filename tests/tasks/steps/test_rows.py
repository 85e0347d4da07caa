"""Rows of stages: pairs, gold pairs, references, and code tasks whose tests work."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from rlcore.data_contracts.adapters.table import ADAPTERS
from rlcore.errors import DataError
from rlcore.tasks.presets.data import DatasetConfig
from rlcore.tasks.presets.graph import FUNCTION, Graders
from rlcore.tasks.steps import references
from rlcore.tasks.steps.data import SCREENS, prepare_dataset
from rlcore.tasks.steps.pair_data import half_of, read_gold_pairs, read_pair_data
from rlcore.tasks.steps.references import references_screen, unusable
from rlcore.tasks.steps.rows import PairRow, read_prompts
from rlcore.tasks.store.storage import write_table
from rlcore.types import Message
from tests.data_contracts.adapters.test_table import ROWS
from tests.rlcore.sandbox.conftest import require_bubblewrap
from tests.tasks.steps.token_views import words_view


def test_anchors_that_have_no_pair_are_refused(tmp_path: Path) -> None:
    empty = pd.DataFrame({name: pd.Series(dtype=object) for name in (*PairRow.__dataclass_fields__, "split")})
    for split in ("train", "eval"):
        write_table(empty, tmp_path / f"{split}.parquet")
    config = SimpleNamespace(
        stage=SimpleNamespace(gold_pairs=("known",)), data={"known": SimpleNamespace(max_tokens=9)}
    )
    context: Any = SimpleNamespace(config=config, inputs={"prepare_known": tmp_path}, stage="reward_model")
    tokenizer: Any = None
    with pytest.raises(DataError, match="gold_pairs have no pair"):
        read_gold_pairs(context, tokenizer)
    config.stage.gold_pairs = ()
    assert read_gold_pairs(context, tokenizer) == []


def context_of(folder: Path, rows: Sequence[dict[str, Any]], data: Sequence[str], **stage: Any) -> Any:
    """A stage of datasets with the same rows for training and evaluation."""
    for name in data:
        (folder / f"prepare_{name}").mkdir(exist_ok=True)
        for split in ("train", "eval"):
            write_table(pd.DataFrame(list(rows)), folder / f"prepare_{name}" / f"{split}.parquet")
    config = SimpleNamespace(
        stage=SimpleNamespace(data=data, **stage), data=dict.fromkeys(data, SimpleNamespace(max_tokens=9))
    )
    inputs = {f"prepare_{name}": folder / f"prepare_{name}" for name in data}
    return SimpleNamespace(config=config, inputs=inputs, stage="reward_model")


def row(question: str, number: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}]
    whole = {"pair_id": f"{number}", "set_id": f"{number}", "messages": messages, "chosen": "a", "rejected": "b"}
    return whole | {"margin": 0.0, "probability": 1.0, "weight": 1.0, "source": "s", "split": "train"}


TOKENIZER: Any = SimpleNamespace(render_demonstration=lambda messages, text: ((len(messages),), (ord(text),)))


def test_sets_of_two_datasets_that_share_an_id_stay_apart(tmp_path: Path) -> None:
    context = context_of(tmp_path, [row("q", 1)], ("one", "two"))
    assert [pair.set_id for pair in read_pair_data(context, TOKENIZER).train] == ["one/1", "two/1"]


def test_halves_have_no_prompt_in_common_and_together_all_pairs(tmp_path: Path) -> None:
    rows = [row(f"q{number // 2}", number) for number in range(40)]
    parts = {
        half: read_pair_data(context_of(tmp_path, rows, ("one",), half=half), TOKENIZER)
        for half in ("first", "second", "all")
    }
    questions = [{each.messages for each in parts[half].rows} for half in ("first", "second")]
    assert questions[0] and questions[1] and not questions[0] & questions[1]
    assert len(parts["first"].rows) + len(parts["second"].rows) == len(parts["all"].rows) == 40
    assert [len(part.held_out) for part in parts.values()] == [40] * 3
    asked = (Message(role="user", content="q0"),)
    assert {half_of(each) for each in parts["all"].rows if each.messages == asked} in ({"first"}, {"second"})


MATH = Graders(kinds=("math",))
REWARD = Graders(kinds=("math",), are_rewards=True)
PROBLEM = '{"dataset": "chain_sum", "entry": {"question": "1 + 2?", "answer": "3", "metadata": {}}}'
WRONG = json.dumps(
    {"dataset": "countdown", "entry": {"question": "", "answer": "1 + 1", "metadata": {"numbers": [3, 4], "target": 7}}}
)  # its scorer computes the answer
TASK = '{"style": "stdin", "tests": [{"input": "1", "output": "2"}]}'
FOREIGN = [
    PROBLEM,
    TASK,
    '{"func_name": "validate_lowercase", "N": 3}',
    "{'a': 1}",
    '[{"role": "user"}]',
    '["assert f(1) == 2", "assert f(2) == 3"]',
    "['assert f(1) == 2']",
    "assert f(1) == 2",
    "def f(x):\n    return x + 1",
    "import math\nprint(math.pi)",
    "```python\nx\n```",
    "print(1)",
    "None",
]
SOUND = ["72", "x=5", "{1, 2}", r"\{1,2\}", "[1, 2]", '["4", "four"]', "f(1)", "Paris", "true", "A", "[[1, 2], [3, 4]]"]


def test_a_reference_that_is_wrong_as_its_own_answer_or_of_another_grader_is_refused_with_the_reason() -> None:
    bad = [*FOREIGN, "proof", r"\frac{1}{0}"]
    with references_screen(MATH) as screen:
        found = screen([*SOUND, "", *bad])
    assert sorted(found) == list(range(len(SOUND) + 1, len(SOUND) + 1 + len(bad)))
    assert all(reason.startswith("no answer can be graded with it") for reason in found.values())


@pytest.mark.parametrize(
    ("graders", "refused"),
    [
        (REWARD, {"", PROBLEM, TASK, WRONG}),
        (MATH, {PROBLEM, TASK, WRONG}),
        (Graders(kinds=("math", "procedural")), {TASK, WRONG}),
        (Graders(kinds=("procedural",)), {"72", TASK, WRONG}),
        (Graders(kinds=("code",)), {"72", PROBLEM, WRONG}),
        (Graders(kinds=("math", FUNCTION)), set()),
    ],
)
def test_one_of_a_datasets_graders_has_to_read_it(graders: Graders, refused: set[str]) -> None:
    rows = ["72", "", PROBLEM, TASK, WRONG]
    found = unusable(rows, graders, {})
    assert {rows[place] for place in found} == refused
    if "procedural" in graders.kinds:
        assert "because it is wrong as its own answer under the reward `procedural`" in found[4]


def test_a_reference_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []
    monkeypatch.setattr(references, "reference_errors", lambda some: [tried.append(each) or "" for each in some])
    known: dict[str, str] = {}
    for _ in range(3):
        assert unusable(["x+1", "x+1", "y"], MATH, known) == {}
    assert tried == ["x+1", "y"]


def test_beyond_the_bound_the_text_alone_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(references, "MAX_TRIED", 1)
    monkeypatch.setattr(references, "reference_errors", lambda some: ["" for _ in some])
    found = unusable(["x+1", "proof", "y"], MATH, {})
    assert list(found) == [1]


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
    report = prepare_dataset(config, seed=0, tokens=words_view(4), folder=folder)
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
    with SCREENS["tests"]() as screen:
        found = screen([task(2, **fields)["reference"] for fields, _ in CONSTANT])
    assert [found.get(place, "") for place in range(len(CONSTANT))] == [reason for _, reason in CONSTANT]


def test_rows_of_public_sets_are_tasks_whose_solutions_pass() -> None:
    require_bubblewrap()
    script = {"question": "Double.", "input_output": json.dumps({"inputs": ["1\n", "2\n"], "outputs": ["2\n", "4\n"]})}
    found = [(name, ROWS[name]) for name in ("apps", "code_contests", "mbpp", "kodcode")] + [
        ("apps", {**script, "solutions": '["print(2*int(input()))"]'}),
        ("apps", {**ROWS["apps"], "solutions": ["def f(x): return 2 * x"]}),
    ]
    tasks = [ADAPTERS[name].rows["prompts"](row)[0]["reference"] for name, row in found]
    with SCREENS["tests"]() as screen:
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


def test_a_rejected_solution_names_the_test_what_it_gave_and_what_was_expected() -> None:
    require_bubblewrap()
    numbers = [{"input": "3", "output": "6.0"}, {"input": "4", "output": "8.0"}]
    given = [
        fields | ({"tests": numbers} if fields.get("style") == "stdin" else {}) for fields, _ in SOLUTIONS.values()
    ]
    with SCREENS["tests"]() as screen:
        found = screen([task(2, **fields)["reference"] for fields in given])
    for place, (name, (_, expected)) in enumerate(SOLUTIONS.items()):
        reason = found.get(place, "").removeprefix("its solution does not pass its tests: ")
        assert (reason.startswith(expected), bool(reason)) == (True, bool(expected)), name

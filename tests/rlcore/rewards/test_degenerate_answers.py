"""Degenerate answers to every data set of reasoning-gym: an answer is paid only if it is right.

Of 60 answers that know nothing of the problem, one may be right by chance: it then is the generator's own answer, or a
number as near to it as the scorer allows.
"""

from __future__ import annotations

import json
import random
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import reasoning_gym
from reasoning_gym.factory import DATASETS

from rlcore.config import RewardTerm
from rlcore.data_contracts.adapters.procedural import generate_prompts
from rlcore.rewards import RewardResources, build_rewards
from rlcore.rewards.procedural import ProceduralReward
from rlcore.rewards.procedural_scorer import grade
from rlcore.types import CORRECT_FROM, Rollout

PRESETS = Path(__file__).parents[3] / "flows" / "presets"
NOT_MADE = {"codeio", "composite"}  # one runs programs, the other needs a configuration
NUM_PROBLEMS = 2
SLOW_TO_MAKE = {"knight_swap", "rubiks_cube"}
ANSWERS = (
    "0", "1", "-1", "2", "3", "5", "10", "24", "42", "100", "1000", "0.0", "0.5", "1/2", "1/0", "1e308", "0e0", "0e0*1",
    "0123456789", "0 0", "0 1", "1 2 3 4", "1,2,3", "6*4*1*1", "(1+2+3)*4", "True", "False", "true", "yes", "no", "Yes",
    "No", "None", "null", "nan", "NaN", "nan+nanj", "inf", "-inf", "oo", "zoo", "[]", "{}", "()", "[[]]", "[0]",
    "[[0]]", "a", "x", "e", "pi", "i", "*", "?", "-", "answer", "I don't know", "impossible", "infeasible", "up", "odd",
    "abcdefghijklmnopqrstuvwxyz", "ABCDEFGHIJKLMNOPQRSTUVWXYZ", "True False", "Yes No", "A B C D",
)  # fmt: skip


@cache
def problems(dataset: str) -> list[dict[str, Any]]:
    made = reasoning_gym.create_dataset(dataset, seed=5, size=NUM_PROBLEMS)
    fields = ("question", "answer", "metadata")
    return [json.loads(json.dumps({name: made[n][name] for name in fields})) for n in range(NUM_PROBLEMS)]


def is_right(answer: str, entry: dict[str, Any]) -> bool:
    """True if an answer is the generator's own, by its text or as a number."""
    own = str(entry["answer"])
    if answer.casefold() == own.casefold():
        return True
    try:
        return abs(float(answer) - float(own)) <= 0.01
    except ValueError:
        return False


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # arc_agi leaves files open
@pytest.mark.parametrize(
    "dataset",
    [
        pytest.param(name, marks=pytest.mark.slow) if name in SLOW_TO_MAKE else name
        for name in sorted(DATASETS.keys() - NOT_MADE)
    ],
)
def test_no_answer_that_knows_nothing_is_paid_unless_it_is_right(dataset: str) -> None:
    assert len(ANSWERS) >= 60
    paid = []
    for entry in problems(dataset):
        for answer in (*ANSWERS, entry["question"], entry["question"][:40]):
            request = {"dataset": dataset, "entry": entry, "answers": [answer]}
            if grade(request) >= CORRECT_FROM and not is_right(answer, entry):
                paid.append((answer, entry["answer"]))
    assert paid == []


Paid = Callable[[str, dict[str, Any], list[str]], list[float | None]]


@pytest.fixture(scope="module")
def paid(make_rollout: Callable[..., Rollout]) -> Iterator[Paid]:
    """The reward of answers to an entry of a data set; its processes are started once."""
    reward = ProceduralReward()

    def of(dataset: str, entry: dict[str, Any], answers: list[str]) -> list[float | None]:
        reference = json.dumps({"dataset": dataset, "entry": entry})
        return [
            score.value for score in reward([make_rollout(f"<answer>{one}</answer>", reference) for one in answers])
        ]

    yield of
    reward.close()


def test_countdown_is_four_operations_on_the_given_numbers_each_once(paid: Paid) -> None:
    entry = {"question": "", "answer": "9*(7 - 2) + 1", "metadata": {"numbers": [1, 2, 7, 9], "target": 46}}
    right = ["9*(7 - 2) + 1", "1+(7-2)*9", "((7-2)*9+1)", "-(2-7)*9+1"]
    wrong = [
        "0e0*(1+2+7+9)+46e0",
        "46",
        "1+2+7+9",
        "9*(7-2)+1+0",
        "9*(7-2)",
        "9*(7-2)*1**1",
        "9*(7-2)//1+1",
        "9*(7.0-2)+1",
        "9*(7-2)+1e0",
        "9*7-2*9+1",
        "9*(7-2)+1/(2-2)",
        "9*(7-2)+1 = 46",
        "sqrt(9)*(7-2)+1",
        "--" * 5_000 + "9*(7-2)+1",
    ]
    assert paid("countdown", entry, right + wrong) == [1.0] * 4 + [0.0] * len(wrong)


def test_puzzle24_is_of_the_given_numbers(paid: Paid) -> None:
    entry = {"question": "", "answer": "(5 - 1/5)*5", "metadata": {"numbers": [1, 5, 5, 5]}}
    answers = ["(5 - 1/5)*5", "5*(5-1/5)", "6*4*1*1", "5*5-1", "5*5-1-0*5", "5*5 - 5/5 + 1 - 1", "5*5-1**5"]
    assert paid("puzzle24", entry, answers) == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]


def test_a_probability_a_truth_and_a_complex_number_have_to_be_right(paid: Paid) -> None:
    rare = {"question": "", "answer": "0.000030517578125", "metadata": {}}
    half = {"question": "", "answer": "0.5", "metadata": {}}
    halts = {"question": "", "answer": "False", "metadata": {}}
    number = {"question": "", "answer": "7.0 - 3.0i", "metadata": {"result": [7, -3]}}
    assert paid("coin_flip", rare, ["1/32768", "3.05e-5", "0", "0.0001"]) == [1.0, 1.0, 0.0, 0.0]
    assert paid("coin_flip", half, ["1/2", "0.50", "0", "0.5123", "1"]) == [1.0, 1.0, 0.0, 0.0, 0.0]
    assert paid("game_of_life_halting", halts, ["False", "false", "True", "no", "x"]) == [
        1.0,
        1.0,
        0,
        0,
        0,
    ]
    answers = ["7 - 3i", "7.0-3.0j", "nan", "nan+nanj", "7", "inf"]
    assert paid("complex_arithmetic", number, answers) == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]


def test_an_answer_that_holds_the_right_one_earns_no_part_of_it(paid: Paid) -> None:
    entry = {"question": "What is 40 + 2?", "answer": "42", "metadata": {}}
    assert paid("chain_sum", entry, ["42", "42 or 43", "40 41 42 43", "142"]) == [1.0, 0.0, 0.0, 0.0]
    for dataset, both in (("ransom_note", "True False"), ("isomorphic_strings", "True False"), ("syllogism", "Yes No")):
        truths = [{**each, "answer": answer} for each in problems(dataset) for answer in both.split()]
        assert [paid(dataset, each, [both, each["answer"]]) for each in truths] == [[0.0, 1.0]] * len(truths)


def test_the_countdown_of_the_committed_preset_pays_its_answers_and_nothing_that_only_looks_like_them(
    make_rollout: Callable[..., Rollout],
) -> None:
    preset = tomllib.loads((PRESETS / "countdown_3b.toml").read_text("utf-8"))
    options = dict(preset["data"]["prompts"]["options"])
    tasks = options.pop("tasks")
    rows = generate_prompts(random.Random(3), num_train=16, num_eval=4, tasks=tasks, settings=options)
    terms = [RewardTerm(**term) for term in preset["stages"]["grpo"]["rewards"]]
    rollouts = []
    for row in rows:
        entry = json.loads(row["reference"])["entry"]
        target, numbers = entry["metadata"]["target"], "+".join(map(str, entry["metadata"]["numbers"]))
        answers = (entry["answer"], f"0e0*({numbers})+{target}e0", f"{target}+0*({numbers})", numbers)
        texts = [f"<think>x</think><answer>{answer}</answer>" for answer in answers]
        rollouts += [make_rollout(text, row["reference"]) for text in texts]
    with build_rewards(terms, resources=RewardResources()) as reward:
        paid = [score.terms["procedural"] for score in reward(rollouts)]
    sums = [json.loads(row["reference"])["entry"]["metadata"] for row in rows]
    assert paid[0::4] == [1.0] * len(rows)
    assert paid[1::4] == paid[2::4] == [0.0] * len(rows)
    assert paid[3::4] == [float(sum(one["numbers"]) == one["target"]) for one in sums]

"""Procedural tasks are scored by their own scorer, no answer is run as code, and none that knows nothing is paid."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import reasoning_gym
from reasoning_gym.factory import DATASETS

from rlcore.rewards.procedural import ProceduralOptions, ProceduralReward
from rlcore.rewards.procedural_scorer import EVALUATED_ANSWERS, EVALUATED_FIELDS, grade
from rlcore.types import CORRECT_FROM
from tests.rlcore.rewards.conftest import make_rollout

TASKS = (
    "chain_sum", "basic_arithmetic", "gcd", "leg_counting", "letter_counting", "gsm_symbolic", "spell_backward",
    "countdown",
)  # fmt: skip


@pytest.fixture(scope="module")
def reward() -> Iterator[ProceduralReward]:
    made = ProceduralReward()
    yield made
    made.close()


def entry_of(dataset: str, seed: int = 7) -> dict[str, object]:
    return json.loads(json.dumps(reasoning_gym.create_dataset(dataset, seed=seed, size=1)[0]))


def reference_of(dataset: str) -> str:
    return json.dumps({"dataset": dataset, "entry": entry_of(dataset)})


@pytest.mark.parametrize("dataset", TASKS)
def test_the_oracle_is_correct_and_another_answer_is_not(reward: ProceduralReward, dataset: str) -> None:
    reference, answer = reference_of(dataset), entry_of(dataset)["answer"]
    texts = [f"<answer>{answer}</answer>", rf"So \boxed{{{answer}}}", "<answer>no idea</answer>", ""]
    values = [score.value for score in reward([make_rollout(text, reference) for text in texts])]
    assert values[:2] == [1.0, 1.0]
    assert all(value is not None and value < 0.5 for value in values[2:])


def test_the_last_number_counts_only_when_asked(reward: ProceduralReward) -> None:
    rollout = make_rollout(f"It is {entry_of('chain_sum')['answer']}.", reference_of("chain_sum"))
    strict = ProceduralReward(ProceduralOptions(last_number=False))
    assert reward([rollout])[0].value == 1.0
    assert strict([rollout])[0].value == 0.0  # decided without a process


def test_a_final_full_stop_neither_spoils_a_number_nor_a_sentence(reward: ProceduralReward) -> None:
    sentence = {"dataset": "spell_backward", "entry": {"answer": "Go.", "metadata": {"word": ".oG"}, "question": ""}}
    number = entry_of("chain_sum")["answer"]
    rollouts = [
        make_rollout("<answer>Go.</answer>", json.dumps(sentence)),
        make_rollout(f"<answer>{number}.</answer>", reference_of("chain_sum")),
    ]
    assert [score.value for score in reward(rollouts)] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("reference", "error"),
    [
        *((text, "reference") for text in ("", "72", "[]", "{}", '{"dataset": "chain_sum"}')),
        ('{"dataset": "alchemy", "entry": {}}', "alchemy"),
    ],
)
def test_a_reference_that_is_no_problem_is_the_graders_failure(
    reward: ProceduralReward, reference: str, error: str
) -> None:
    score = reward([make_rollout("<answer>1</answer>", reference)])[0]
    assert score.value is None
    assert error in score.error


def test_an_overlong_answer_is_wrong_at_once(reward: ProceduralReward) -> None:
    rollout = make_rollout(f"<answer>{'1' * 20_001}</answer>", reference_of("chain_sum"))
    assert reward([rollout])[0].value == 0.0


EVALUATES = re.compile(r"\b(?:eval|exec|parse_expr|sympify)\(\s*(\w[\w.]*(?:\[[^]]*\])?)")

OWN_TEXT = {"full_code", "exp.replace", "problem_str"}  # what a generator evaluates of its own making


def evaluated_by(dataset: str) -> set[str]:
    """Return the arguments that a data set's module gives to eval or sympy's parser in its source."""
    module = inspect.getmodule(DATASETS[dataset][0])
    assert module is not None
    calls = [line for line in inspect.getsource(module).splitlines() if not line.lstrip().startswith("def ")]
    own = {"logic.propositional_logic"}  # has a parser of its own, by the same name
    return set() if module.__name__.partition(".")[2] in own else set(EVALUATES.findall("\n".join(calls))) - OWN_TEXT


def test_every_scorer_that_evaluates_answers_or_rows_has_a_list_of_allowed_tokens() -> None:
    found = {name: evaluated for name in DATASETS if (evaluated := evaluated_by(name))}
    assert {name for name, evaluated in found.items() if "answer" in evaluated} == set(EVALUATED_ANSWERS)
    fields = {name: evaluated - {"answer"} for name, evaluated in found.items() if evaluated - {"answer"}}
    assert fields.keys() == EVALUATED_FIELDS.keys()
    assert fields == {
        "bitwise_arithmetic": {"problem"},  # verify_solution(entry["metadata"]["problem"], answer)
        "intermediate_integration": {'metadata["integrand"]'},
        "number_sorting": {'entry["answer"]'},
        "polynomial_multiplication": {'entry["answer"]'},
        "simple_integration": {'metadata["integrand"]'},
    }


def with_field(entry: dict[str, object], path: str, value: object) -> dict[str, object]:
    first, _, rest = path.partition(".")
    inner = entry[first]
    return {**entry, first: with_field(inner, rest, value) if rest and isinstance(inner, dict) else value}


FIELDS = [(dataset, path) for dataset, fields in sorted(EVALUATED_FIELDS.items()) for path in fields]

ANSWERS = {"number_sorting": "[1]", "bitwise_arithmetic": "0x1"}


@pytest.mark.parametrize(("dataset", "path"), FIELDS)
def test_no_field_of_a_row_is_run_as_code(reward: ProceduralReward, tmp_path: Path, dataset: str, path: str) -> None:
    mark = tmp_path / "owned"
    for value in (f"open({str(mark)!r}, 'w')", [1], None):
        entry = with_field(entry_of(dataset), path, value)
        reference = json.dumps({"dataset": dataset, "entry": entry})
        (score,) = reward([make_rollout(f"<answer>{ANSWERS.get(dataset, 'x')}</answer>", reference)])
        assert not mark.exists()
        assert score.value is None  # the row's fault, not the answer's
        assert f"{dataset} runs the entry's {path} as code" in score.error


@pytest.mark.parametrize("dataset", sorted(EVALUATED_FIELDS))
def test_the_fields_of_the_generators_own_rows_are_let_through(dataset: str) -> None:
    made = reasoning_gym.create_dataset(dataset, seed=11, size=10)
    for entry in map(dict, made):
        assert grade({"dataset": dataset, "entry": json.loads(json.dumps(entry)), "answers": []}) == 0.0


ATTACKS = (
    "__import__('os').system('touch owned')", "exec('1')", "open('/etc/passwd').read()", "().__class__",
    "[x for x in ().__class__.__mro__]", "print(24)", "x.__class__", "eval(1)", "S('1')", "[].append(1)", "ab(3)",
    "Integral(x, x)",
)  # fmt: skip


@pytest.mark.parametrize("dataset", sorted(EVALUATED_ANSWERS))
def test_no_answer_is_run_as_code(dataset: str) -> None:
    allowed = EVALUATED_ANSWERS[dataset]
    assert [attack for attack in ATTACKS if allowed.fullmatch(attack)] == []


@pytest.mark.parametrize("dataset", sorted(EVALUATED_ANSWERS))
def test_the_allowed_tokens_let_the_right_answer_through(dataset: str) -> None:
    entry = entry_of(dataset)
    assert grade({"dataset": dataset, "entry": entry, "answers": [str(entry["answer"])]}) >= 0.99


def test_of_several_readings_of_an_answer_the_best_counts() -> None:
    entry = entry_of("chain_sum")
    assert grade({"dataset": "chain_sum", "entry": entry, "answers": ["x", str(entry["answer"])]}) == 1.0
    assert grade({"dataset": "chain_sum", "entry": entry, "answers": []}) == 0.0


def test_an_answer_that_hangs_its_scorer_is_wrong_and_a_row_that_breaks_it_is_unscored() -> None:
    """The first answer is a power of 370 million digits; the second entry has no answer to score by."""
    reward = ProceduralReward(ProceduralOptions(timeout_seconds=1.0))
    broken = json.dumps({"dataset": "chain_sum", "entry": {"question": "", "metadata": {}}})
    rollouts = [
        make_rollout("<answer>9**9**9</answer>", reference_of("countdown")),
        make_rollout("<answer>1</answer>", broken),
        make_rollout(f"<answer>{entry_of('countdown')['answer']}</answer>", reference_of("countdown")),
    ]
    hangs, raises, right = reward(rollouts)
    reward.close()
    assert (hangs.value, raises.value, right.value) == (0.0, None, 1.0)
    assert "KeyError" in raises.error


NOT_MADE = {"codeio", "composite"}  # one runs programs, the other needs a configuration

NUM_PROBLEMS = 1

SLOW_TO_MAKE = {"knight_swap", "rubiks_cube"}

BLIND_ANSWERS = (
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
    assert len(BLIND_ANSWERS) >= 60
    paid = []
    for entry in problems(dataset):
        for answer in (*BLIND_ANSWERS, entry["question"], entry["question"][:40]):
            request = {"dataset": dataset, "entry": entry, "answers": [answer]}
            if grade(request) >= CORRECT_FROM and not is_right(answer, entry):
                paid.append((answer, entry["answer"]))
    assert paid == []


Paid = Callable[[str, dict[str, Any], list[str]], list[float | None]]


@pytest.fixture(scope="module")
def paid(reward: ProceduralReward) -> Paid:
    """The reward of answers to an entry of a data set."""

    def of(dataset: str, entry: dict[str, Any], answers: list[str]) -> list[float | None]:
        reference = json.dumps({"dataset": dataset, "entry": entry})
        return [
            score.value for score in reward([make_rollout(f"<answer>{one}</answer>", reference) for one in answers])
        ]

    return of


def test_countdown_is_four_operations_on_the_given_numbers_each_once(paid: Paid) -> None:
    entry = {"question": "", "answer": "9*(7 - 2) + 1", "metadata": {"numbers": [1, 2, 7, 9], "target": 46}}
    right = ["9*(7 - 2) + 1", "1+(7-2)*9", "((7-2)*9+1)", "-(2-7)*9+1"]
    wrong = [
        "0e0*(1+2+7+9)+46e0", "46", "1+2+7+9", "9*(7-2)+1+0", "9*(7-2)", "9*(7-2)*1**1", "9*(7-2)//1+1", "9*(7.0-2)+1",
        "9*(7-2)+1e0", "9*7-2*9+1", "9*(7-2)+1/(2-2)", "9*(7-2)+1 = 46", "sqrt(9)*(7-2)+1", "--" * 5_000 + "9*(7-2)+1",
    ]  # fmt: skip
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
    assert paid("game_of_life_halting", halts, ["False", "false", "True", "no", "x"]) == [1.0, 1.0, 0, 0, 0]
    answers = ["7 - 3i", "7.0-3.0j", "nan", "nan+nanj", "7", "inf"]
    assert paid("complex_arithmetic", number, answers) == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]


def test_an_answer_that_holds_the_right_one_earns_no_part_of_it(paid: Paid) -> None:
    entry = {"question": "What is 40 + 2?", "answer": "42", "metadata": {}}
    assert paid("chain_sum", entry, ["42", "42 or 43", "40 41 42 43", "142"]) == [1.0, 0.0, 0.0, 0.0]
    for dataset, both in (("ransom_note", "True False"), ("isomorphic_strings", "True False"), ("syllogism", "Yes No")):
        truths = [{**each, "answer": answer} for each in problems(dataset) for answer in both.split()]
        assert [paid(dataset, each, [both, each["answer"]]) for each in truths] == [[0.0, 1.0]] * len(truths)

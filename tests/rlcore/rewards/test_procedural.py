"""Procedural tasks are scored by their own scorer, and no answer is run as code."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterator

import pytest
import reasoning_gym
from reasoning_gym.factory import DATASETS

from rlcore.rewards.procedural import ProceduralOptions, ProceduralReward
from rlcore.rewards.procedural_scorer import EVALUATED_ANSWERS, grade
from rlcore.types import Rollout

TASKS = ("chain_sum", "basic_arithmetic", "gcd", "leg_counting", "letter_counting", "gsm_symbolic", "spell_backward")


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
def test_the_oracle_is_correct_and_another_answer_is_not(
    reward: ProceduralReward, make_rollout: Callable[..., Rollout], dataset: str
) -> None:
    reference, answer = reference_of(dataset), entry_of(dataset)["answer"]
    texts = [f"<answer>{answer}</answer>", rf"So \boxed{{{answer}}}", "<answer>no idea</answer>", ""]
    values = [score.value for score in reward([make_rollout(text, reference) for text in texts])]
    assert values[:2] == [1.0, 1.0]
    assert all(value is not None and value < 0.5 for value in values[2:])


def test_the_last_number_counts_only_when_asked(reward: ProceduralReward, make_rollout: Callable[..., Rollout]) -> None:
    rollout = make_rollout(f"It is {entry_of('chain_sum')['answer']}.", reference_of("chain_sum"))
    strict = ProceduralReward(ProceduralOptions(last_number=False))
    assert reward([rollout])[0].value == 1.0
    assert strict([rollout])[0].value == 0.0  # decided without a process


def test_a_final_full_stop_neither_spoils_a_number_nor_a_sentence(
    reward: ProceduralReward, make_rollout: Callable[..., Rollout]
) -> None:
    sentence = {"dataset": "spell_backward", "entry": {"answer": "Go.", "metadata": {"word": ".oG"}, "question": ""}}
    number = entry_of("chain_sum")["answer"]
    rollouts = [
        make_rollout("<answer>Go.</answer>", json.dumps(sentence)),
        make_rollout(f"<answer>{number}.</answer>", reference_of("chain_sum")),
    ]
    assert [score.value for score in reward(rollouts)] == [1.0, 1.0]


@pytest.mark.parametrize("reference", ["", "72", "[]", "{}", '{"dataset": "chain_sum"}'])
def test_a_reference_that_is_no_problem_is_the_graders_failure(
    reward: ProceduralReward, make_rollout: Callable[..., Rollout], reference: str
) -> None:
    score = reward([make_rollout("<answer>1</answer>", reference)])[0]
    assert score.value is None
    assert "reference" in score.error


def test_an_unknown_generator_is_the_graders_failure(
    reward: ProceduralReward, make_rollout: Callable[..., Rollout]
) -> None:
    reference = json.dumps({"dataset": "alchemy", "entry": {}})
    score = reward([make_rollout("<answer>1</answer>", reference)])[0]
    assert score.value is None
    assert "alchemy" in score.error


def test_an_overlong_answer_is_wrong_at_once(reward: ProceduralReward, make_rollout: Callable[..., Rollout]) -> None:
    rollout = make_rollout(f"<answer>{'1' * 20_001}</answer>", reference_of("chain_sum"))
    assert reward([rollout])[0].value == 0.0


def test_every_scorer_that_evaluates_answers_has_a_list_of_allowed_tokens() -> None:
    """``eval`` of the dataset's own fields is no danger; of the answer it is."""
    evaluates = re.compile(r"(?:eval|parse_expr|sympify)\(\s*answer")
    found = {
        name for name, (kind, _) in DATASETS.items() if evaluates.search(inspect.getsource(inspect.getmodule(kind)))
    }
    assert found == set(EVALUATED_ANSWERS)


ATTACKS = (
    "__import__('os').system('touch owned')",
    "exec('1')",
    "open('/etc/passwd').read()",
    "().__class__",
    "[x for x in ().__class__.__mro__]",
    "print(24)",
    "x.__class__",
    "eval(1)",
    "S('1')",
    "[].append(1)",
    "ab(3)",
    "Integral(x, x)",
)


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


def test_a_scorer_that_hangs_or_raises_costs_one_answer_each(make_rollout: Callable[..., Rollout]) -> None:
    """The first answer is a power of 370 million digits; the second entry has no answer to score by."""
    reward = ProceduralReward(ProceduralOptions(timeout_seconds=2.0))
    broken = json.dumps({"dataset": "chain_sum", "entry": {"question": "", "metadata": {}}})
    rollouts = [
        make_rollout("<answer>9**9**9</answer>", reference_of("countdown")),
        make_rollout("<answer>1</answer>", broken),
        make_rollout(f"<answer>{entry_of('countdown')['answer']}</answer>", reference_of("countdown")),
    ]
    hangs, raises, right = reward(rollouts)
    reward.close()
    assert (hangs.value, raises.value, right.value) == (None, None, 1.0)
    assert "longer than 2 s" in hangs.error
    assert "KeyError" in raises.error

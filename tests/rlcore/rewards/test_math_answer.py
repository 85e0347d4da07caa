"""The mathematical verifier: the worked examples, the strict rules, and what a policy would try."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcore.data_contracts.adapters.table import ADAPTERS
from rlcore.rewards.grader_pool import GraderPool
from rlcore.rewards.math_answer import MathOptions, MathReward, compare_exact
from rlcore.types import Rollout
from tests.quick import within_seconds

GSM8K = Path(__file__).parents[4] / "shared" / "data" / "gsm8k_train.jsonl"


@pytest.fixture(scope="module")
def reward() -> Iterator[MathReward]:
    made = MathReward(MathOptions(evaluated_only=False, timeout_seconds=2.0))
    yield made
    made.close()


def test_the_worked_examples_score_one(reward: MathReward, make_rollout: Callable[..., Rollout]) -> None:
    """1+1-1+1.1-1 is 1.1; 5x(3 + 4) at x = 1 is 35."""
    rollouts = [make_rollout(r"The answer is \box{1.1}.", "1.1"), make_rollout("= 5*7 = 35", "35")]
    scores = reward(rollouts)
    assert [score.value for score in scores] == [1.0, 1.0]
    assert scores[0].terms == {"math": 1.0}


@pytest.mark.parametrize(
    ("text", "reference", "value"),
    [
        (r"\boxed{0.5}", "1/2", 1.0),
        (r"\boxed{\frac{2}{4}}", "0.5", 1.0),
        (r"\boxed{1,000}", "1000", 1.0),
        (r"\boxed{\$18.00}", "18", 1.0),
        (r"\boxed{18\text{ dollars}}", "18", 1.0),
        (r"\boxed{50\%}", r"50\%", 1.0),
        (r"\boxed{paris}", r"\text{Paris}", 1.0),
        ("<think>\\boxed{1}</think> \\boxed{2}", "2", 1.0),
        ("#### 72", "Natalia sold 48+24 = 72 clips.\n#### 72", 1.0),
        (r"\boxed{0.3333333333333333}", "1/3", 0.0),
        (r"\boxed{0.1234568}", "0.1234567", 0.0),
        (r"\boxed{50\%}", "0.5", 0.0),
        (r"\boxed{50\%}", "50", 0.0),
        (r"\boxed{0.5}", r"50\%", 0.0),
        (r"This is $\boxed{50}\%$ of all.", r"50\%", 1.0),
        (r"It grows by \(\boxed{50}\) percent.", "50%", 1.0),
        (r"The rate, in percent: $\boxed{50}$ %", "50", 1.0),
        (r"$\boxed{0.5}\%$", r"50\%", 0.0),
        (r"$\boxed{50}$ and 3 % more", r"50\%", 0.0),
        (r"\boxed{6=5}", "5", 0.0),
        (r"\boxed{5=5}", "5", 0.0),
        (r"\boxed{5 \quad 6}", "11", 0.0),
        (r"\boxed{5 6}", "6", 0.0),
        (r"\boxed{1 \boxed{5}}", "5", 0.0),
        ("\\boxed{５}", "5", 0.0),
        (r"\boxed{}", "5", 0.0),
        ("I do not know", "5", 0.0),
        (r"<think> \boxed{5}", "5", 0.0),
        (r"\boxed{London}", "Paris", 0.0),
        (r"\boxed{Spira}", "Paris", 0.0),  # to a parser both are the product of five letters
        (r"\boxed{five}", "5", 0.0),
    ],
)
def test_what_is_decided_without_symbols(
    reward: MathReward, make_rollout: Callable[..., Rollout], text: str, reference: str, value: float
) -> None:
    assert reward([make_rollout(text, reference)])[0].value == value


EQUAL = [
    (r"\frac{\sqrt{8}}{2}", r"\sqrt{2}"),
    ("x(x+1)", "x^2+x"),
    ("x**2 + x", "x^2+x"),
    ("2, 1", "1, 2"),
    (r"\{1, 2\}", "1, 2"),
    ("(1, 2)", "(1, 2)"),
    (r"[3,4] \cup [1,2]", r"[1,2] \cup [3,4]"),
    (r"x \leq 5", "x<=5"),
    ("5", "x = 5"),
    ("x = 5", "x=5"),
    (r"1\frac{1}{2}", r"\frac{3}{2}"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
    ("10^6", "1000000"),
    (r"x \in [1,2]", "[1,2]"),
    ("A", r"\text{A}"),
]
UNEQUAL = [
    ("[5,5]", "5"),
    (r"\{5\}", "5"),
    (r"5 \text{ or } 6", "6"),
    (r"\pm 5", "5"),
    ("0^0", "1"),
    ("(1-1)^0", "1"),
    ("[1,2]", "(1,2)"),
    ("(1,2)", r"\{1,2\}"),
    ("(2,1)", "(1,2)"),
    ("1.414214", r"\sqrt{2}"),
    ("x^2+1", "x^2+x"),
    ("x < 5", "5"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}2\\1\end{pmatrix}"),
    ("1/0", "5"),
    ("x", "y"),
    ("A", "B"),
]


def test_equal_mathematics_is_equal_and_unequal_is_not(math_pool: GraderPool) -> None:
    outcomes = math_pool.grade_all([{"answer": a, "reference": r} for a, r in EQUAL + UNEQUAL])
    assert [outcome.error for outcome in outcomes] == [""] * len(outcomes)
    verdicts = {pair: outcome.value for pair, outcome in zip(EQUAL + UNEQUAL, outcomes, strict=True)}
    assert [pair for pair in EQUAL if not verdicts[pair]] == []
    assert [pair for pair in UNEQUAL if verdicts[pair]] == []


SEVERAL = json.dumps(["proof", "Paris", "75", r"\frac{1}{2}"])  # the first one grades no answer


@pytest.mark.parametrize(
    ("answer", "value"), [("paris", 1.0), ("75", 1.0), ("0.5", 1.0), ("proof", 0.0), ("Rome", 0.0), ("[75]", 0.0)]
)
def test_any_of_several_accepted_answers_is_right(
    reward: MathReward, make_rollout: Callable[..., Rollout], answer: str, value: float
) -> None:
    (score,) = reward([make_rollout(rf"\boxed{{{answer}}}", SEVERAL)])
    assert score.value == value


@pytest.mark.parametrize(
    "answer",
    ["x" * 1_501, "(" * 26 + "5" + ")" * 26, "1" * 200 + "x", "٥", "5%", r"\boxed{5} x", "5\\;6"],
    ids=lambda text: text[:12],
)
def test_what_no_parser_may_see_is_wrong_at_once(answer: str) -> None:
    assert compare_exact(answer, "x+5", evaluated_only=False) is False


@pytest.mark.parametrize(
    ("answer", "reference", "verdict"),
    [
        ("7", "7", True),
        ("3/4", "0.75", True),
        ("3+4", "7", False),
        ("6/2", "3", False),
        ("2/4", "1/2", False),
        ("2/4", "2/4", True),
        (r"\sqrt{49}", "7", False),
        ("x+1", "x+1", True),
    ],
)
def test_with_evaluated_only_an_echo_of_the_problem_is_no_answer(answer: str, reference: str, verdict: bool) -> None:
    assert compare_exact(answer, reference, evaluated_only=True) is verdict


def test_without_evaluated_only_an_expression_needs_the_symbolic_grader() -> None:
    assert compare_exact("3+4", "7", evaluated_only=False) is None


BINOMIAL = r"\binom{9999999}{4999999}"  # minutes of arithmetic that no limit on sizes foresees
TOWERS = ["9^{9^9}", "9^{9^{9^{9}}}", "9**9**9", "2^99999", "2^{-99999}", "9^(9^9)", "99999!", "5!!", "2^{9!}", "9^9^9"]


@pytest.mark.parametrize("answer", TOWERS)
def test_a_power_tower_is_wrong_at_once_unless_the_reference_is_one(answer: str) -> None:
    assert compare_exact(answer, "5", evaluated_only=False) is False
    assert compare_exact(answer + "+0", answer, evaluated_only=False) is None


@pytest.mark.parametrize(
    "answer", ["x^{2}+y^{2}", "10^{3}", "2^{x+1}", "x^2y^2", "5!", "e^{x}", "(x^2)(y^2)", "{x^2}^1"]
)
def test_a_common_power_is_left_to_the_grader(answer: str) -> None:
    assert compare_exact(answer, "x+5", evaluated_only=False) is None


def test_an_endless_computation_is_wrong_and_the_next_answers_are_graded(
    reward: MathReward, make_rollout: Callable[..., Rollout]
) -> None:
    pairs = [(rf"\boxed{{{BINOMIAL}}}", "5"), (r"\boxed{y+y}", "2y"), (r"\boxed{y+y}", "3y"), (r"\boxed{1}", "1")]
    evil, *others = reward([make_rollout(text, reference) for text, reference in pairs])
    assert evil.value == 0.0  # its own fault: without a score it would be left out
    assert [score.value for score in others] == [1.0, 0.0, 1.0]


def test_a_reference_that_cannot_be_parsed_is_the_graders_failure(
    reward: MathReward, make_rollout: Callable[..., Rollout]
) -> None:
    score = reward([make_rollout(r"\boxed{x+1}", "$$$")])[0]
    assert score.value is None
    assert "reference" in score.error


def test_grading_works_in_a_thread(reward: MathReward, make_rollout: Callable[..., Rollout]) -> None:
    """A signal-based timeout fails there, and scored every answer 0 in one system."""
    found: list[float | None] = []
    rollout = make_rollout(r"\boxed{z+z}", "2z")
    thread = threading.Thread(target=lambda: found.extend(score.value for score in reward([rollout])))
    thread.start()
    thread.join()
    assert found == [1.0]


def test_plain_numbers_start_no_process(make_rollout: Callable[..., Rollout]) -> None:
    reward = MathReward()
    reward([make_rollout(r"\boxed{1}", "1"), make_rollout(r"\boxed{no idea}", "1")])
    assert reward._pool._fork_server is None


def test_a_thousand_short_answers_are_scored_in_seconds(make_rollout: Callable[..., Rollout]) -> None:
    rollouts = [make_rollout(f"Step by step: {i} + 1. So \\boxed{{{i}}}.", str(i + i % 2)) for i in range(1_000)]
    with within_seconds():
        scores = MathReward()(rollouts)
    assert sum(score.value or 0.0 for score in scores) == 500.0


@given(st.fractions(), st.fractions())
def test_two_fractions_are_equal_exactly_when_they_are(first: object, second: object) -> None:
    assert compare_exact(f"{first}", f"{second}", evaluated_only=False) is (first == second)


@given(st.text(alphabet="0123456789./%\\{}()[]=+-*^ xfrac,", max_size=30))
def test_any_answer_is_decided_or_left_to_symbols_without_an_exception(answer: str) -> None:
    assert compare_exact(answer, "1/2", evaluated_only=False) in (True, False, None)


@pytest.mark.skipif(not GSM8K.exists(), reason="../shared/data/gsm8k_train.jsonl is absent")
def test_people_s_answers_verify_and_a_neighbours_do_not(make_rollout: Callable[..., Rollout]) -> None:
    """All rows through the adapter, against the next row with another number; no answer needs a process."""
    rows = [json.loads(line) for line in GSM8K.read_text(encoding="utf-8").splitlines()]
    references = [ADAPTERS["gsm8k"].rows["prompts"](row)[0]["reference"] for row in rows]
    worked = [ADAPTERS["gsm8k"].rows["demonstrations"](row)[0]["completion"] for row in rows]
    reward = MathReward()

    def values(texts: list[str], wanted: list[str]) -> list[float | None]:
        scores = reward([make_rollout(text, reference) for text, reference in zip(texts, wanted, strict=True)])
        return [score.value for score in scores]

    assert values([row["answer"] for row in rows], references) == [1.0] * 7_473
    assert values(worked, [row["answer"] for row in rows]) == [1.0] * 7_473  # the raw solution as the reference
    ring = references * 2
    others = [next(other for other in islice(ring, i, None) if other != own) for i, own in enumerate(references)]
    assert values(worked, others) == [0.0] * 7_473
    assert reward._pool._fork_server is None

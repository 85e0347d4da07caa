"""The mathematics reward: exact comparison, and answers that cost a grader more than it has."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Iterator
from fractions import Fraction
from itertools import islice
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcore.data_contracts.adapters.table import ADAPTERS
from rlcore.rewards.answers import clean
from rlcore.rewards.grader_pool import GraderPool
from rlcore.rewards.math_answer import MathOptions, MathReward, compare_exact
from rlcore.rewards.references import reference_errors
from rlcore.rewards.units import with_percent_sign
from tests.quick import within_seconds
from tests.rlcore.rewards.conftest import make_rollout
from tests.rows import rows_of

GSM8K = Path(__file__).parents[5] / "shared" / "data" / "gsm8k_train.jsonl"


@pytest.fixture(scope="module")
def reward() -> Iterator[MathReward]:
    made = MathReward(MathOptions(evaluated_only=False, timeout_seconds=0.5))
    yield made
    made.close()


def test_the_worked_examples_score_one(reward: MathReward) -> None:
    """1+1-1+1.1-1 is 1.1; 5x(3 + 4) at x = 1 is 35."""
    rollouts = [make_rollout(r"The answer is \box{1.1}.", "1.1"), make_rollout("= 5*7 = 35", "35")]
    scores = reward(rollouts)
    assert [score.value for score in scores] == [1.0, 1.0]
    assert scores[0].terms == {"math": 1.0}


@pytest.mark.parametrize(
    "answer",
    ["x" * 1_501, "(" * 26 + "5" + ")" * 26, "1" * 200 + "x", "٥", "5%", r"\boxed{5} x", "5\\;6"],
    ids=lambda text: text[:12],
)
def test_what_no_parser_may_see_is_wrong_at_once(answer: str) -> None:
    assert compare_exact(answer, "x+5", evaluated_only=False) is False


@pytest.mark.parametrize(
    "answer",
    ["9^{9^9}", "9^{9^{9^{9}}}", "9**9**9", "2^99999", "2^{-99999}", "9^(9^9)", "99999!", "5!!", "2^{9!}", "9^9^9"],
)
def test_a_power_tower_is_wrong_at_once_unless_the_reference_is_one(answer: str) -> None:
    assert compare_exact(answer, "5", evaluated_only=False) is False
    assert compare_exact(answer + "+0", answer, evaluated_only=False) is None


def test_an_endless_computation_is_wrong_and_the_next_answers_are_graded(reward: MathReward) -> None:
    endless = r"\boxed{\binom{9999999}{4999999}}"  # minutes of arithmetic that no limit on sizes foresees
    pairs = [(endless, "5"), (r"\boxed{y+y}", "2y"), (r"\boxed{y+y}", "3y"), (r"\boxed{1}", "1")]
    evil, *others = reward([make_rollout(text, reference) for text, reference in pairs])
    assert evil.value == 0.0  # its own fault: without a score it would be left out
    assert [score.value for score in others] == [1.0, 0.0, 1.0]


def test_grading_works_in_a_thread(reward: MathReward) -> None:
    """A signal-based timeout fails there, and scored every answer 0 in one system."""
    found: list[float | None] = []
    rollout = make_rollout(r"\boxed{z+z}", "2z")
    thread = threading.Thread(target=lambda: found.extend(score.value for score in reward([rollout])))
    thread.start()
    thread.join()
    assert found == [1.0]


def test_a_thousand_short_answers_are_scored_in_seconds() -> None:
    rollouts = [make_rollout(f"Step by step: {i} + 1. So \\boxed{{{i}}}.", str(i + i % 2)) for i in range(1_000)]
    with within_seconds():
        scores = MathReward()(rollouts)
    assert sum(score.value or 0.0 for score in scores) == 500.0


@pytest.mark.skipif(not GSM8K.exists(), reason="../shared/data/gsm8k_train.jsonl is absent")
def test_answers_of_people_are_right_and_those_of_another_row_wrong() -> None:
    """Rows through the adapter, against the next row with another number; no answer needs a process."""
    rows = [json.loads(line) for line in GSM8K.read_text(encoding="utf-8").splitlines()][::7]
    before = psutil.Process().children()
    references = [ADAPTERS["gsm8k"].rows["prompts"](row)[0]["reference"] for row in rows]
    worked = [ADAPTERS["gsm8k"].rows["demonstrations"](row)[0]["completion"] for row in rows]
    reward = MathReward()

    def values(texts: list[str], wanted: list[str]) -> list[float | None]:
        scores = reward([make_rollout(text, reference) for text, reference in zip(texts, wanted, strict=True)])
        return [score.value for score in scores]

    assert values([row["answer"] for row in rows], references) == [1.0] * len(rows)
    assert values(worked, [row["answer"] for row in rows]) == [1.0] * len(rows)  # the raw solution as the reference
    ring = references * 2
    others = [next(other for other in islice(ring, i, None) if other != own) for i, own in enumerate(references)]
    assert values(worked, others) == [0.0] * len(rows)
    assert psutil.Process().children() == before


NUMBERS_AS_PEOPLE_WRITE_THEM = st.one_of(
    st.integers(-(10**9), 10**9).map(Fraction),
    st.fractions(max_denominator=999),
    st.decimals(-1000, 1000, places=3).map(Fraction),
)


def variants(value: Fraction | int) -> list[str]:
    """One number in the ways of writing it that the grader reads."""
    sign, size = "-" if value < 0 else "", abs(value)
    above, below = size.numerator, size.denominator
    written = [f"{sign}{above}/{below}", f"{sign}\\frac{{{above}}}{{{below}}}", f"${value}$", f"**{value}**."]
    if below == 1:
        value = int(value)
        written += [f"{value}", f"{value}.0", f"{value:,}", rf"{value} \text{{ apples}}", f"{value} dollars"]
        written += [f"{value:,}".replace(",", "{,}"), f"{sign}${size}", rf"{value}^\circ"]
    elif above > below:
        written += [f"{sign}{above // below} {above % below}/{below}"]
    return written


@given(NUMBERS_AS_PEOPLE_WRITE_THEM)
def test_every_way_of_writing_a_number_answers_it(value: Fraction) -> None:
    assert {
        text: compare_exact(clean(text), str(value), evaluated_only=False) for text in variants(value)
    } == dict.fromkeys(variants(value), True)


@given(NUMBERS_AS_PEOPLE_WRITE_THEM, NUMBERS_AS_PEOPLE_WRITE_THEM)
def test_no_way_of_writing_another_number_answers_it(value: Fraction, other: Fraction) -> None:
    if value != other:
        assert {compare_exact(clean(text), str(value), evaluated_only=False) for text in variants(other)} == {False}


@given(st.text(alphabet="0123456789./%\\{}()[]=+-*^ xfractext,°π", max_size=40))
def test_any_answer_is_decided_or_left_to_symbols_without_an_exception(answer: str) -> None:
    assert compare_exact(clean(with_percent_sign(answer)), "1/2", evaluated_only=False) in (True, False, None)


def test_a_reference_that_no_answer_equals_is_found_with_its_reason() -> None:
    rows = {row["reference"]: row["error"] for row in rows_of(__file__, "references")}
    found = dict(zip(rows, reference_errors(list(rows)), strict=True))
    assert {
        text: error for text, error in found.items() if rows[text] not in error or bool(rows[text]) != bool(error)
    } == {}


@pytest.mark.parametrize("reference", ["proof", "notfound", "$$$", r"\frac{1}{0}", ""])
def test_by_such_a_reference_no_answer_has_a_score_whatever_it_is(reference: str) -> None:
    reward = MathReward(MathOptions(timeout_seconds=10.0))
    scores = reward([make_rollout(rf"\boxed{{{answer}}}", reference) for answer in (reference, "x+1", "7", "no")])
    reward.close()
    assert [score.value for score in scores] == [None] * 4
    assert all("reference" in score.error for score in scores)


PRODUCTS, ANSWERS, HOSTILE = 3_000, 5_000, 0.05

# Each costs a grader more than it has: minutes of arithmetic, or all of its memory or stack.
EVIL = (
    r"\binom{9999999}{4999999}", "9^{9^9}", r"\prod_{k=1}^{9999999}k", "2^{2^{2^{2^{2^2}}}}", "2^{99999}x",
    "(" * 24 + "x" + ")" * 24, "x^{9999}" * 40, r"\frac{" * 20 + "1" + "}{2}" * 20, r"\int_0^1 x^{x^{x^x}}dx", "9999!",
)  # fmt: skip


def spelled(draw: random.Random) -> tuple[str, int]:
    """A product of two to four numbers side by side, and its value."""
    factors = [draw.randint(-20, 60) for _ in range(draw.randint(2, 4))]
    value = 1
    for factor in factors:
        value *= factor
    first = draw.choice((f"{factors[0]}", f"({factors[0]})", rf"\left({factors[0]}\right)"))
    rest = [
        draw.choice((f"({each})", rf"\left({each}\right)", f" ({each})", rf"\cdot({each})")) for each in factors[1:]
    ]
    return first + "".join(rest), value


@pytest.mark.slow
def test_thousands_of_products_are_what_multiplication_makes_of_them(
    record_property: Callable[[str, object], None],
) -> None:
    record_property("hostile", PRODUCTS)
    record_property("sound", PRODUCTS)
    draw = random.Random(14)
    pairs = [spelled(draw) for _ in range(PRODUCTS)]
    with GraderPool("math", timeout_seconds=20.0, num_workers=2) as pool:
        right = pool.grade_all([{"answer": text, "reference": str(value)} for text, value in pairs])
        wrong = pool.grade_all([{"answer": text, "reference": str(value + 1)} for text, value in pairs])
    assert [pair for pair, outcome in zip(pairs, right, strict=True) if outcome.value is not True] == []
    assert [pair for pair, outcome in zip(pairs, wrong, strict=True) if outcome.value is not False] == []


def answers(count: int) -> Iterator[tuple[str, str, float]]:
    """An answer, its reference and its reward."""
    draw = random.Random(14)
    for number in range(count):
        if draw.random() < HOSTILE:
            yield draw.choice(EVIL) + f"+{number}", "x^2+1", 0.0
        else:
            is_right = draw.random() < 0.5
            reference = f"{number}x+{number + (not is_right)}"
            yield rf"\frac{{{2 * number}x}}{{2}}+{number}", reference, float(is_right)


@pytest.mark.slow
def test_hostile_answers_among_honest_ones_are_wrong_and_cost_nobody_else_a_score(
    record_property: Callable[[str, object], None],
) -> None:
    rows = list(answers(ANSWERS))
    num_hostile = sum(reference == "x^2+1" for _, reference, _ in rows)
    record_property("hostile", num_hostile)
    record_property("sound", ANSWERS - num_hostile)
    reward = MathReward(MathOptions(timeout_seconds=5.0))
    scores = reward([make_rollout(rf"\boxed{{{answer}}}", reference) for answer, reference, _ in rows])
    reward.close()
    assert [row for row, score in zip(rows, scores, strict=True) if score.value != row[2]] == []

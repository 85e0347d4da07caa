"""Answers in a sentence, an equation, money and words that multiply: verdicts decided by hand, before they were run.

``R`` answers the reference, ``W`` does not. Every form that is right stands beside forms that look like it and are not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from rlcore.rewards.answers import extract_stated
from rlcore.rewards.math_answer import MathOptions, MathReward, compare_exact
from rlcore.types import Rollout
from tests.quick import within_seconds

R, W = 1.0, 0.0

SENTENCES = [
    ("The answer is 18", "18", R),
    ("the answer is 18.", "18", R),
    ("The answer is: 18", "18", R),
    ("The final answer is $18$.", "18", R),
    ("Answer: 18", "18", R),
    ("**Answer:** 18", "18", R),
    ("**Answer**: 18", "18", R),
    ("**The answer is 18**", "18", R),
    ("Her total is **18**", "18", R),
    ("Total: 18 dollars", "18", R),
    ("The total cost of a bag is $18.00", "18", R),
    ("So the answer is 1/2", "0.5", R),
    ("Therefore, the answer is 18", "18", R),
    ("The answer is -3", "-3", R),
    ("The answer is 50%", "50%", R),
    ("The answer is 1 1/2 hours", "3/2", R),
    ("The answer is Paris", "Paris", R),
    ("The capital is Paris", "London", W),
    ("The answer is -3", "3", W),
    ("The answer is 50%", "50", W),
    ("The answer is 19", "18", W),
    ("The answer is not 18", "18", W),
    ("The answer isn't 18", "18", W),
    ("The answer is never 18", "18", W),
    ("The answer is less than 18", "18", W),
    ("The answer is at least 18", "18", W),
    ("The answer is about 18", "18", W),
    ("The answer is 18 or 19", "18", W),
    ("The answer is 18 or 19", "19", W),
    ("The answer is 17, 18", "18", W),
    ("The answer is 17 or the answer is 18", "18", W),
    ("The answer is 17. The answer is 18", "18", W),
    ("The answer is between 17 and 19", "18", W),
    ("The answer is 17 18", "18", W),
    ("The wrong answer is 18", "18", W),
    ("Half of the answer is 18", "18", W),
    ("Twice the answer is 18", "18", W),
    ("Neither is 18", "18", W),
    ("What is 18", "18", W),
    ("How many clips did she sell if the price is 18", "18", W),
    ("If the price is 18", "18", W),
    ("The answer is", "18", W),
    ("The answer is eighteen", "18", W),
    ("The answer is x", "18", W),
    ("18 is wrong", "18", W),
    ("18 unless it rains", "18", W),
]
EQUATIONS = [
    ("x = 18", "18", R),
    ("x=18", "18", R),
    ("$x = 18$", "18", R),
    ("n = 18.", "18", R),
    ("Thus, x = 18", "18", R),
    ("x = 18 dollars", "18", R),
    ("x = $18", "18", R),
    ("Total = 18", "18", R),
    ("x is 18", "18", R),
    (r"x = \frac{1}{2}", "0.5", R),
    ("x = -18", "-18", R),
    ("x = 18", "x = 18", R),
    ("18", "x = 18", R),
    ("y = 18", "x = 18", W),
    ("x = -18", "18", W),
    ("-x = 18", "18", W),
    ("2x = 18", "18", W),
    ("x/2 = 18", "18", W),
    ("x^2 = 18", "18", W),
    ("x + 1 = 18", "18", W),
    ("xy = 18", "18", W),
    ("log x = 18", "18", W),
    ("twice x = 18", "18", W),
    ("x = 3*6 = 18", "18", W),
    ("18 = 18", "18", W),
    ("18 = x", "18", W),
    ("x = 18 or x = 19", "18", W),
    ("x = 18, y = 19", "19", W),
    ("x = 18, 19", "18", W),
    ("x != 18", "18", W),
    ("x < 18", "18", W),
    ("x =", "18", W),
    ("= 18", "18", W),
    ("x = x", "18", W),
]
MONEY = [
    ("US$18", "18", R),
    (r"US\$18", "18", R),
    ("¥3", "3", R),
    ("₹1,800", "1800", R),
    ("A$18.50", "18.5", R),
    ("-US$18", "-18", R),
    ("USD 18", "18", R),
    ("EUR 18", "18", R),
    ("Rs. 40", "40", R),
    ("18¥", "18", R),
    ("18$", "18", R),
    ("18 ₹", "18", R),
    ("US$18", "19", W),
    ("-US$18", "18", W),
    ("US$18 and US$19", "19", W),
    ("US$", "18", W),
    ("X$18", "18", W),
    ("$$18 $19", "18", W),
]
MULTIPLES = [
    ("1.8 billion", "1800000000", R),
    ("$1.8 billion", "1,800,000,000", R),
    ("US$1.8 billion", "1800000000", R),
    ("1.8 billion dollars", "1800000000", R),
    (r"1.8\text{ billion}", "1800000000", R),
    ("The answer is 1.8 billion", "1800000000", R),
    ("1800000000", "1.8 billion", R),
    ("1800 million", "1.8 billion", R),
    ("5 hundred thousand", "500000", R),
    ("2 dozen eggs", "24", R),
    ("3 Million people", "3000000", R),
    ("1.8 billion", "1.8", W),
    ("1.8", "1.8 billion", W),
    ("1.8 billion", "1800000", W),
    ("1.8 million", "1800000000", W),
    ("1.9 billion", "1800000000", W),
    ("2 dozen", "2", W),
    ("2 dozen and 3", "27", W),
    ("2 dollars million", "2000000", W),
    ("2 half", "1", W),
    ("2 thirds", "2", W),
    ("1.8% billion", "1800000000", W),
    ("billion", "1000000000", W),
]
DEGENERATE = [
    ("", "18", W),
    (" ", "18", W),
    ("The answer is 18" * 40, "18", W),
    ("1 2 3 18", "18", W),
    ("1, 2, 3, 18", "18", W),
    ("18 17", "18", W),
    ("16+2", "17", W),
]
VERDICTS = SENTENCES + EQUATIONS + MONEY + MULTIPLES + DEGENERATE


@pytest.fixture(scope="module")
def reward() -> Iterator[MathReward]:
    made = MathReward(MathOptions(timeout_seconds=10.0))
    yield made
    made.close()


@pytest.mark.parametrize("form", ["#### {}", "<answer>{}</answer>", r"So \boxed{{{}}}."])
def test_the_table_of_verdicts_holds_after_every_marker(
    reward: MathReward, make_rollout: Callable[..., Rollout], form: str
) -> None:
    assert min(sum(row[2] == verdict for row in VERDICTS) for verdict in (R, W)) >= 40
    scores = reward([make_rollout(form.format(answer), reference) for answer, reference, _ in VERDICTS])
    assert [(row, score.error) for row, score in zip(VERDICTS, scores, strict=True) if score.value is None] == []
    assert [row for row, score in zip(VERDICTS, scores, strict=True) if score.value != row[2]] == []


def test_where_the_problem_is_an_expression_its_echo_is_no_answer_in_a_sentence_either() -> None:
    for echo in ("x = 3+4", "The answer is 3+4", "3+4 = 7", "The answer is 14/2"):
        assert compare_exact(echo, "7", evaluated_only=True) is False
    assert compare_exact("The answer is 7", "7", evaluated_only=True) is True


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        ("x = 18", "18"),
        ("The answer is **18**.", "18"),
        ("Total cost of a bag: $18", "$18"),
        ("log x = 18", "log x = 18"),
        ("18", "18"),
        ("f(x) = 18", "f(x) = 18"),
        ("x^2 = 18", "x^2 = 18"),
        ("What is 18", "What is 18"),
        ("3:4", "3:4"),
        (r"\text{The answer is } 18", "18"),
        (r"\text{The answer is not } 18", r"\text{The answer is not } 18"),
    ],
)
def test_what_a_text_states(answer: str, found: str) -> None:
    assert extract_stated(answer) == found


@pytest.mark.parametrize("piece", ["a ", "is ", "*", "a,", "x = ", "the answer is ", "-", "'", "not"])
def test_reading_a_sentence_is_quick_for_any_answer(piece: str) -> None:
    with within_seconds():
        extract_stated(piece * (100_000 // len(piece)))
        compare_exact(piece * (1_400 // len(piece)), "18", evaluated_only=False)

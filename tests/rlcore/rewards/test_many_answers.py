"""Untrusted answers in number: products in every spelling, and hostile mathematics among honest."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest

from rlcore.rewards.grader_pool import GraderPool
from rlcore.rewards.math_answer import MathOptions, MathReward
from rlcore.types import Rollout

pytestmark = pytest.mark.slow

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


def test_hostile_answers_among_honest_ones_are_wrong_and_cost_nobody_else_a_score(
    make_rollout: Callable[..., Rollout], record_property: Callable[[str, object], None]
) -> None:
    rows = list(answers(ANSWERS))
    num_hostile = sum(reference == "x^2+1" for _, reference, _ in rows)
    record_property("hostile", num_hostile)
    record_property("sound", ANSWERS - num_hostile)
    reward = MathReward(MathOptions(timeout_seconds=5.0))
    scores = reward([make_rollout(rf"\boxed{{{answer}}}", reference) for answer, reference, _ in rows])
    reward.close()
    assert [row for row, score in zip(rows, scores, strict=True) if score.value != row[2]] == []

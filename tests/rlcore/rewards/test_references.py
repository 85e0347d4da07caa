from __future__ import annotations

from collections.abc import Callable

import pytest

from rlcore.rewards.math_answer import MathOptions, MathReward
from rlcore.rewards.references import plain_error, reference_errors
from rlcore.types import Rollout

SOUND = [
    "17", "3/4", r"\frac{\sqrt{8}}{2}", "x^2+1", "(1, 2)", r"[0,\infty)", "Paris", "none", "no solution", "A and C",
    r"1, 2, \ldots, n", r"p \land q", "#### 72 bags, all in all", "We add 3 and 4.\n#### 7", r"so \boxed{x+1}", "12:30",
    r"\text{undefined}", r"C \setminus D", "table", "above the line", r"\infty", r"|x| < 3", "f(a)+f(b)",
    "(a), (b)", r"\mathbb{Z}^+", "x^{-}", r"\$5",
]  # fmt: skip
BROKEN = {
    "proof": "not an answer",
    "Proof.": "not an answer",
    r"\text{See the solution}": "not an answer",
    "notfound": "not an answer",
    "not found": "not an answer",
    "N/A": "not an answer",
    "?": "no content",
    "Q.E.D.": "not an answer",
    "Answer not given": "not an answer",
    "[Not supported yet]": "not an answer",
    "Show that a+b is even": "not an answer",
    "The claim is proven.": "not an answer",
    r"\text{Proof complete}": "not an answer",
    r"\blacksquare": "no content",
    "to be determined": "not an answer",
    "No answer": "not an answer",
    "证明略": "not an answer",
    "见解析": "not an answer",
    "无": "not an answer",
    r"\frac{3}{7": "truncated",
    r"\sqrt{": "no content",
    "y = ": "truncated",
    "(a) 4 (b) 7": "several parts",
    "(i) 4; (ii) 7": "several parts",
    "": "no content",
    "$$$": "no content",
    r"\text{}": "no content",
    r"\frac{1}{0}": "has no value",
    "0^0": "has no value",
    r"so \boxed{5": "unclosed",
    r"\includegraphics[width=3cm]{a.png}": "picture",
    "[asy] draw((0,0)--(1,1)); [/asy]": "picture",
    "Because the sum of two odd numbers is even, the claim holds for all of the numbers that are given.": "words",
    "x+" * 800 + "x": "characters",
    "(" * 30 + "x" + ")" * 30: "nested",
    r"\left(\frac{9}{13} t \diamondsuit \frac{51}{13}, \frac{11}{13} t \clubsuit \frac{4}{13}, t": "too long",
}


def test_a_reference_that_an_answer_can_equal_is_sound() -> None:
    assert dict(zip(SOUND, reference_errors(SOUND), strict=True)) == dict.fromkeys(SOUND, "")


def test_a_reference_that_no_answer_equals_is_found_with_its_reason() -> None:
    found = dict(zip(BROKEN, reference_errors(list(BROKEN)), strict=True))
    assert {reference: fault for reference, fault in found.items() if not fault or BROKEN[reference] not in fault} == {}


@pytest.mark.parametrize("reference", ["proof", "notfound", "$$$", r"\frac{1}{0}", ""])
def test_by_such_a_reference_no_answer_has_a_score_whatever_it_is(
    make_rollout: Callable[..., Rollout], reference: str
) -> None:
    reward = MathReward(MathOptions(timeout_seconds=10.0))
    scores = reward([make_rollout(rf"\boxed{{{answer}}}", reference) for answer in (reference, "x+1", "7", "no")])
    reward.close()
    assert [score.value for score in scores] == [None] * 4
    assert all("reference" in score.error for score in scores)


def test_a_text_that_is_no_formula_is_compared_as_text_and_a_wrong_answer_is_wrong(
    make_rollout: Callable[..., Rollout],
) -> None:
    reward = MathReward(MathOptions(timeout_seconds=10.0))
    answers = [r"\neg s", r"\lnot s", "s", "7"]
    scores = reward([make_rollout(rf"\boxed{{{answer}}}", r"\neg s") for answer in answers])
    reward.close()
    assert [score.value for score in scores] == [1.0, 1.0, 0.0, 0.0]


def test_plain_faults_are_found_without_a_process() -> None:
    assert plain_error("proof") and not plain_error("x+1")

"""The page of a verdict: every check with its interval, and the answers that changed."""

from __future__ import annotations

import pandas as pd

from rlcore.evaluation.conditions import Check
from rlcore.evaluation.promotion import PromotionDecision
from rlcore.tasks.kinds.promote.page import render

ACCURACY = Check(
    name="accuracy", estimate=0.05, low=0.01, high=0.09, p_value=0.00213, limit=0.0, passed=True, sentence=""
)
LENGTH = Check(
    name="completion/length", estimate=80.0, low=80.0, high=80.0, p_value=None, limit=60.0, passed=False, sentence=""
)


def verdict(*checks: Check) -> PromotionDecision:
    return PromotionDecision(promote=False, look=2, alpha=0.0125, checks=checks, sentence="Refused: too long.")


def answers(**correct: bool) -> pd.DataFrame:
    rows = [{"prompt_id": name, "correct": right, "completion": f"{name}|\n{right}"} for name, right in correct.items()]
    return pd.DataFrame(rows)


def test_a_first_champion_is_compared_with_none() -> None:
    page = render("tiny-grpo", verdict(), {"challenger": answers(a=True)}, champion="")
    assert page == "# tiny-grpo: the first champion\n\n**Refused: too long.**\n"


def test_every_check_is_a_row_and_what_is_no_estimate_has_no_interval() -> None:
    page = render("tiny-grpo", verdict(ACCURACY, LENGTH), {"challenger": answers(a=True)}, champion="3")
    assert page.startswith("# tiny-grpo: against version 3\n")
    assert "Look 2 at these held-out prompts, level 0.0125." in page
    # Two sides of 0.0125 leave 97.5 %.
    assert "| check | estimate | 97.5 % interval | limit | p | passed |" in page
    assert "| accuracy | 0.050 | [0.010, 0.090] | 0.000 | 0.0021 | yes |" in page
    assert "| completion/length | 80.000 | – | 60.000 | – | **no** |" in page


def test_problems_won_and_lost_stand_with_both_answers_in_one_line() -> None:
    both = {"champion": answers(a=False, b=True, c=True), "challenger": answers(c=True, a=True, b=False)}
    page = render("tiny-grpo", verdict(ACCURACY), both, champion="3")
    assert page.count("## Problems won: 1") == page.count("## Problems lost: 1") == 1
    assert r"| a | a\| False | a\| True |" in page
    assert r"| b | b\| True | b\| False |" in page
    assert "| c |" not in page


def test_where_nothing_changed_the_page_says_so() -> None:
    same = {"champion": answers(a=True), "challenger": answers(a=True)}
    page = render("tiny-grpo", verdict(ACCURACY), same, champion="3")
    assert page.endswith("## Problems won: 0\n\nNone.\n\n## Problems lost: 0\n\nNone.\n")

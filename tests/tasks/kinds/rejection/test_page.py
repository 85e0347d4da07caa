"""The page of rejection sampling: a row per task, and why answers were not kept."""

from __future__ import annotations

from rlcore.evaluation.intervals import Interval
from rlcore.sampling.rejection import RejectionStats
from rlcore.tasks.kinds.rejection.page import render

SUMS = RejectionStats(
    num_prompts=10,
    sampled=80,
    verified=40,
    kept=20,
    pass_rate=Interval(mean=0.5, low=0.4, high=0.6, n=10),
    solved=Interval(mean=0.9, low=0.6, high=0.98, n=10),
)


def test_a_task_is_a_row_with_what_was_sampled_verified_and_kept() -> None:
    lines = render(
        {"all": SUMS, "sums": SUMS}, {"duplicate": 3, "wrong": 40, "too long": 0}, confidence=0.95
    ).splitlines()
    row = "10 | 80 | 40 | 20 | 0.250 | 0.500 | [0.400, 0.600] | 0.900 |"
    assert lines[2:4] == [f"| all | {row}", f"| sums | {row}"]
    assert lines[-1] == "Not kept: 3 duplicate, 40 wrong."
    assert len({line.count("|") for line in lines[:4]}) == 1  # a table


def test_where_everything_is_kept_the_page_says_none() -> None:
    assert render({"all": SUMS}, {"wrong": 0}, confidence=0.95).endswith("\nNot kept: none.")

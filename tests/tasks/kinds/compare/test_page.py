"""The comparison's page: every figure with its interval, paired tests on the same problems."""

from __future__ import annotations

import pandas as pd

from rlcore.evaluation.paired_tests import paired_difference
from rlcore.tasks.kinds.compare.page import (
    accuracy_table,
    changed_answers,
    cost_table,
    difference_table,
    rejection_section,
)

SUMMARY = {
    "eval/accuracy": 0.25,
    "eval/accuracy_low": 0.2,
    "eval/accuracy_high": 0.3,
    "eval/problems": 600.0,
    "completion/length": 12.0,
    "eval/pass_at_1": 0.4,
    "eval/pass_at_1_low": 0.3,
    "eval/pass_at_8": 0.9,
}


def test_an_accuracy_stands_with_its_interval_and_its_pass_at_k() -> None:
    row = accuracy_table({"SFT": SUMMARY}, confidence=0.9).splitlines()[-1]
    assert row == "| SFT | 0.250 | [0.200, 0.300] | 600 | 0.400 | 0.900 (k=8) | 12.0 |"


def test_a_difference_stands_with_its_interval_and_p_value() -> None:
    # 10 problems, 8 right against 2 right, 6 of them only by the new one: McNemar p = 2 * 0.5^6 = 0.031.
    paired = paired_difference([1] * 8 + [0] * 2, [1] * 2 + [0] * 8)
    table = difference_table({"GRPO - SFT": paired}, confidence=0.9)
    assert table.startswith("| contrast | difference | 90 % interval |")
    assert table.splitlines()[-1].startswith("| GRPO - SFT | +0.600 | [")
    assert table.endswith("| 0.031 |")


def test_seconds_are_summed_over_the_iterations_by_part() -> None:
    history = [
        {"iteration": 1, "seconds/rollout": 1.0},
        {"iteration": 2, "seconds/rollout": 2.5, "seconds/update": 4.0},
    ]
    assert cost_table({"GRPO": history}).splitlines()[-1] == "| GRPO | 2 | 3.5 | 0.0 | 4.0 | 0.0 | 0.0 |"


def test_only_problems_that_turned_right_are_shown_and_bars_in_answers_do_not_break_the_table() -> None:
    before = pd.DataFrame({"prompt_id": ["a", "b"], "correct": [False, True], "completion": ["x|y", "ok"]})
    after = pd.DataFrame({"prompt_id": ["a", "b"], "correct": [True, True], "completion": ["7", "ok"]})
    assert changed_answers(before, after).splitlines()[2:] == ["| a | x\\|y | 7 |"]
    assert changed_answers(after, after) == "None."


def test_rejection_sampling_stands_with_its_counts_its_pass_rate_and_what_went() -> None:
    account = {
        "all": {
            "num_prompts": 10,
            "sampled": 40,
            "verified": 12,
            "kept": 6,
            "pass_rate": {"mean": 0.3, "low": 0.2, "high": 0.4},
        },
        "dropped": {"truncated": 1, "duplicate": 0, "below_threshold": 27, "over_prompt_cap": 6},
        "train": 5,
        "eval": 1,
    }
    assert rejection_section("rejection", account, confidence=0.9).splitlines()[-1] == (
        "40 answers to 10 prompts, 12 verified, 6 kept (5 to train on, 1 held out); "
        "pass rate 0.300 [0.200, 0.400] (90 %). Not kept: 1 truncated, 27 below_threshold, 6 over_prompt_cap."
    )

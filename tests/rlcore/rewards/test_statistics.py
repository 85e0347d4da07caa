"""Per-part figures: what a term paid, how it spread, and where it had no value."""

from __future__ import annotations

import pytest

from rlcore.metrics import check_names
from rlcore.rewards.base import graded, ungraded
from rlcore.rewards.statistics import part_statistics
from rlcore.types import Score


def test_the_figures_of_two_parts() -> None:
    """math: 1, 0, 0, 1 has mean 0.5, std 0.5, half of them 0; judge: 2 and 4 have mean 3, std 1; half have no value."""
    both = [Score(value=1.0, parts={"math": 1.0, "judge": 2.0}), Score(value=1.0, parts={"math": 0.0, "judge": 4.0})]
    alone = [Score(value=None, parts={"math": value}, error="judge: slow") for value in (0.0, 1.0)]
    figures = part_statistics([*both, *alone], all_scores=[*both, *alone])
    assert figures == {
        "reward/part/math": 0.5,
        "reward/part_std/math": 0.5,
        "reward/part_zero/math": 0.5,
        "reward/part_unscored/math": 0.0,
        "reward/part/judge": 3.0,
        "reward/part_std/judge": 1.0,
        "reward/part_zero/judge": 0.0,
        "reward/part_unscored/judge": 0.5,
    }
    check_names(figures)


def test_only_the_share_without_a_value_is_of_all_scores() -> None:
    """Trained on: one 0. Sampled: that one, a 1 that was cut off, and two without a value."""
    trained = graded("math", 0.0)
    figures = part_statistics([trained], all_scores=[trained, graded("math", 1.0), ungraded("slow"), ungraded("slow")])
    assert figures["reward/part/math"] == 0.0
    assert figures["reward/part_zero/math"] == 1.0
    assert figures["reward/part_unscored/math"] == 0.5


def test_without_scores_there_are_no_figures() -> None:
    assert part_statistics([], all_scores=[]) == pytest.approx({})


def test_a_part_that_is_not_on_a_rollouts_data_has_not_failed_there() -> None:
    """Two code answers, one without a value, and two sums that the part is not on: half of what it was asked failed."""
    sums = [Score(value=1.0, parts={"math": 1.0}, skipped=("code",))] * 2
    code = [Score(value=0.5, parts={"code": 0.5}, skipped=("math",)), Score(value=None, parts={}, skipped=("math",))]
    figures = part_statistics([*sums, code[0]], all_scores=[*sums, *code])
    assert figures["reward/part_unscored/code"] == 0.5
    assert figures["reward/part_unscored/math"] == 0.0

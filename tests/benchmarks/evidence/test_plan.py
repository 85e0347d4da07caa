"""The plan: strict, and it counts its comparisons before the runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlcore.errors import ConfigError
from tests.benchmarks.evidence.sample import CLAIMS, TWO_TASKS, plan


def test_a_primary_contrast_counts_once_per_task(tmp_path: Path) -> None:
    assert plan(tmp_path).level == 0.05 / 2
    assert plan(tmp_path, TWO_TASKS).level == 0.05 / 3
    assert plan(tmp_path, TWO_TASKS.replace('tasks = ["sums"]', 'tasks = ["long"]')).every_task == (
        "sums",
        "words",
        "long",
    )


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("margin = 0.05", "", "exactly one must be above 0"),
        ("margin = 0.05", "margin = 0.05\nexpected = 0.1", "exactly one must be above 0"),
        ('"learning"', '"speed"', "measure = 'speed': must be one of accuracy"),
        ("slow = -1", "slow = 0", "a weight other than 0"),
        ('figure = "curves"', 'figure = "pie"', "claim.0.figure = 'pie': must be one of"),
    ],
)
def test_a_wrong_plan_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(tmp_path, CLAIMS.replace(old, new, 1))

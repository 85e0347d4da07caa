"""Claims: measures of a run worked by hand, contrasts with their intervals, and the table of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.evidence.claims import Contrast, claims_table, difference, read_plan, read_results, value_of, verdict
from benchmarks.evidence.claims import write_results as write

PLAN = """
tasks = ["sums"]
[[claim]]
text = "The fast method learns faster"
source = "a textbook"
  [[claim.contrast]]
  name = "fast against slow"
  arms = { fast = 1, slow = -1 }
  measure = "learning"
  expected = 0.05
  [[claim.contrast]]
  name = "end"
  arms = { fast = 1, slow = -1 }
  measure = "accuracy"
  margin = 0.05
  primary = false
  tasks = ["words"]
"""


def run(scores: Sequence[float], *, right: str = "", seconds: float = 10.0, before: float = 0.0) -> dict[str, Any]:
    """Run an arm with iterations of 100 completions and so many seconds, after other stages of so many seconds."""
    places = range(1, len(scores) + 1)
    costs = {"completions": [100 * each for each in places], "cpu_seconds": [seconds * each for each in places]}
    total = before + seconds * len(scores)
    fixed = {"memory": {"total": 20.0 * 2**30}, "figures": {"win_rate": 0.5}}
    return {"right": right, "cpu_seconds": total, "curve": costs | {"score": list(scores)}, **fixed}


def test_measures_of_a_run() -> None:
    arm = run([0.2, 0.4, 0.9], right="1100")
    names = ("accuracy", "learning", "memory", "figures.win_rate")
    assert [value_of(arm, name) for name in names] == [0.5, pytest.approx(0.5), 20.0, 0.5]
    # Of iterations of unequal size the larger counts more: (100 · .2 + 300 · .4) / 400.
    unequal = arm["curve"] | {"completions": [100, 400, 401], "score": [0.2, 0.4, 0.35]}
    assert value_of(arm | {"curve": unequal}, "learning") == pytest.approx(0.35)
    none = {"right": "", "memory": {}, "curve": {"completions": []}, "figures": {}}
    assert [value_of(none, name) for name in (*names, "score_at_equal_cpu")] == [None] * 5


@pytest.mark.parametrize(
    ("seconds", "score"),
    [
        (30.0, 0.9),  # 300 completions, the last quarter from 225 on: all of the third iteration
        (25.0, (12.5 * 0.4 + 50 * 0.9) / 62.5),  # 250, the last quarter from 187.5 on
        (0.0, 0.2),  # nothing yet: the first iteration
        (99.0, 0.9),
    ],
)
def test_the_score_at_equal_cpu_is_the_mean_of_the_last_quarter(seconds: float, score: float) -> None:
    arm = run([0.2, 0.4, 0.9])
    assert value_of(arm, "score_at_equal_cpu", cpu_seconds=seconds) == pytest.approx(score)
    after = arm | {"cpu_seconds": arm["cpu_seconds"] + 5.0}  # 5 s of earlier stages come first
    assert value_of(after, "score_at_equal_cpu", cpu_seconds=seconds + 5.0) == pytest.approx(score)


def test_equal_cpu_is_that_of_the_cheaper_arm_and_seeds_are_those_of_all_arms() -> None:
    tried = {"fast": {0: run([0.2, 0.4, 0.9], seconds=20.0), 1: run([1.0])}, "slow": {0: run([0.2, 0.2, 0.2])}}
    contrast = Contrast(name="", arms={"fast": 1.0, "slow": -1.0}, measure="score_at_equal_cpu", expected=0.1)
    # fast has 150 completions after slow's 30 s, the last quarter from 112.5 on: .4
    assert difference(contrast, tried)[0] == [pytest.approx(0.2)]


def test_more_seeds_do_not_narrow_what_all_of_them_measure_on_the_same_pairs() -> None:
    contrast = Contrast(name="", arms={"model": 1.0}, measure="figures.gain", expected=0.1)

    def error(gains: Sequence[float], ends: float) -> float:
        figures = [{"gain": gain, "gain_low": gain - ends, "gain_high": gain + ends} for gain in gains]
        runs = {seed: run([0.1]) | {"figures": each} for seed, each in enumerate(figures)}
        return difference(contrast, {"model": runs})[1]

    assert error([0.3] * 3, 1.96 * 0.02) == pytest.approx(0.02) == error([0.3] * 9, 1.96 * 0.02)
    assert error([0.29, 0.30, 0.31], 1.96 * 0.01) == pytest.approx((1e-4 / 3 + 1e-4) ** 0.5)


@pytest.mark.parametrize(
    ("low", "high", "of_difference", "of_none"),
    [
        (0.01, 0.04, "held", "held"),
        (-0.01, 0.04, "not told apart", "held"),
        (-0.04, -0.01, "contradicted", "held"),
        (0.06, 0.09, "held", "contradicted"),
        (0.01, 0.09, "held", "not told apart"),
    ],
)
def test_a_verdict_is_that_of_the_interval(low: float, high: float, of_difference: str, of_none: str) -> None:
    arms = {"fast": 1.0, "slow": -1.0}
    assert verdict(Contrast(name="", arms=arms, measure="learning", expected=0.1), low, high) == of_difference
    assert verdict(Contrast(name="", arms=arms, measure="learning", margin=0.05), low, high) == of_none


def test_the_table_has_both_intervals_and_a_verdict_on_each_task(tmp_path: Path) -> None:
    (tmp_path / "claims.toml").write_text(PLAN)
    for seed, last in enumerate((0.70, 0.71, 0.72)):
        arms = {"fast": run([0.2, 0.6, last], right="1101"), "slow": run([0.2, 0.3, 0.5], right="1100")}
        for task in ("sums", "words", "other"):
            write({"task": task, "seed": seed, "arms": arms}, tmp_path / f"evidence-{task}-{seed}.json")
    rows = claims_table(read_plan(tmp_path / "claims.toml"), read_results(tmp_path)).splitlines()
    assert rows[0] == "| claim | contrast | other | sums | words |"
    # Means (.5, .5033, .5067) − .3333; the standard error is .01 / 3 / √3, Student's t of 2 degrees 4.303.
    cell = "+0.170 [+0.162, +0.178], **held** [+0.162, +0.178]"
    assert rows[2] == f"| The fast method learns faster | fast against slow | {cell} | {cell} | – |"
    assert rows[3] == "|  | end | +0.250 [+0.250, +0.250], secondary | – | +0.250 [+0.250, +0.250], secondary |"


def test_a_primary_contrast_counts_once_per_task(tmp_path: Path) -> None:
    (tmp_path / "claims.toml").write_text(PLAN.replace("primary = false", "").replace('["sums"]', '["sums", "more"]'))
    assert read_plan(tmp_path / "claims.toml").level == 0.05 / 3

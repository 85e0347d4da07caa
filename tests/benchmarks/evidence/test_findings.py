"""Findings: measures of a run worked by hand, and contrasts from the plan and the results."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.evidence.findings import contrast_of, findings, run_noise, value_of
from benchmarks.evidence.results import Arm
from tests.benchmarks.evidence.sample import CLAIMS, TWO_TASKS, arms, plan, run


def test_measures_of_a_run() -> None:
    arm = run([0.2, 0.4, 0.9], right="1100")
    assert value_of(arm, "accuracy") == 0.5
    assert value_of(arm, "learning") == pytest.approx(0.5)
    assert value_of(arm, "memory") == 20.0
    assert value_of(arm, "figures.win_rate") == 0.5
    # Of iterations of unequal size the larger counts more: (100 · .2 + 300 · .4) / 400.
    unequal = replace(arm.curve, completions=(100, 400, 401), score=(0.2, 0.4, 0.35))
    assert value_of(replace(arm, curve=unequal), "learning") == pytest.approx(0.35)


def test_a_run_without_a_measure_has_no_value() -> None:
    names = ("accuracy", "learning", "score_at_equal_cpu", "memory", "figures.other")
    assert [value_of(Arm(), name) for name in names] == [None] * 5


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
    after = replace(arm, cpu_seconds=arm.cpu_seconds + 5.0)  # 5 s of earlier stages come first
    assert value_of(after, "score_at_equal_cpu", cpu_seconds=seconds + 5.0) == pytest.approx(score)


def test_equal_cpu_is_that_of_the_cheaper_arm() -> None:
    tried = {"fast": {0: run([0.2, 0.4, 0.9], seconds=20.0)}, "slow": {0: run([0.2, 0.2, 0.2])}}
    between = run_noise(tried, "score_at_equal_cpu")
    found = contrast_of({"fast": 1.0, "slow": -1.0}, tried, "score_at_equal_cpu", between=between)
    assert found is not None
    # fast has 150 completions after slow's 30 s, the last quarter from 112.5 on: .4
    assert found.mean == pytest.approx(0.2)


def test_a_contrast_uses_the_seeds_that_all_its_arms_have() -> None:
    found = contrast_of({"fast": 1.0, "start": -1.0}, arms(), "accuracy", between=run_noise(arms(), "accuracy"))
    assert found is not None
    assert found.seeds == 1
    assert found.mean == pytest.approx(0.25)


def test_the_plan_is_judged_on_every_task_that_has_the_arms(tmp_path: Path) -> None:
    found = findings(plan(tmp_path, TWO_TASKS), {"sums": arms(), "words": {"fast": arms()["fast"]}})
    assert [(each.contrast, each.task, each.verdict) for each in found] == [
        ("fast against slow", "sums", "held"),
        ("end", "sums", "held"),
        ("start", "sums", ""),
    ]
    # Means of (.2, .6, .7 + seed / 100) and (.2, .3, .5)
    assert found[0].difference.mean == pytest.approx((0.5 + 0.01 / 3) - 1 / 3)
    assert found[1].difference.mean == 0.0
    assert found[0].needed is None


def test_a_primary_interval_is_corrected_for_all_that_are(tmp_path: Path) -> None:
    def width(text: str) -> float:
        found = findings(plan(tmp_path, text), {"sums": arms()})[0].difference
        return found.high - found.low

    # Two degrees of freedom: t of 1 - .05 / 4 is 6.205, of 1 - .05 / 2 it is 4.303.
    alone = CLAIMS.replace('  tasks = ["sums"]', "  primary = false")
    assert width(CLAIMS) / width(alone) == pytest.approx(6.205 / 4.303, 1e-3)
    not_primary = CLAIMS.replace("primary = false", "").replace("expected = 0.05", "expected = 0.05\nprimary = false")
    assert width(not_primary) == pytest.approx(width(alone))


def test_a_claim_that_is_not_told_apart_gets_the_seeds_that_would_tell(tmp_path: Path) -> None:
    noisy = {seed: run([0.2, 0.3, last], right="1" * (100 + seed)) for seed, last in enumerate((0.3, 0.5, 0.9))}
    found = findings(plan(tmp_path), {"sums": arms() | {"fast": noisy}})[0]
    assert found.verdict == "not told apart"
    assert found.needed is not None
    assert found.needed > 3


def test_more_seeds_do_not_narrow_what_all_of_them_measure_on_the_same_pairs() -> None:
    def interval(gains: list[float], ends: float) -> float:
        measured = {
            seed: Arm(figures={"gain": gain, "gain_low": gain - ends, "gain_high": gain + ends})
            for seed, gain in enumerate(gains)
        }
        runs = {"model": measured}
        found = contrast_of({"model": 1.0}, runs, "figures.gain", between=run_noise(runs, "figures.gain"))
        assert found is not None
        return found.high - found.mean

    assert interval([0.3, 0.3, 0.3], 0.05) == pytest.approx(0.05, rel=1e-3)  # its runs are equal
    assert interval([0.3] * 9, 0.05) == pytest.approx(0.05, rel=1e-3)
    # Runs of 0.29, 0.30, 0.31: variance of the mean 1e-4 / 3, of the pairs 0.01² = 1e-4; total V = 4e-4 / 3, with
    # 2 · (V / (1e-4 / 3))² = 32 degrees of freedom: t = 2.0369.
    assert interval([0.29, 0.30, 0.31], 1.96 * 0.01) == pytest.approx(2.0369 * (4e-4 / 3) ** 0.5, rel=1e-3)
    assert interval([0.29, 0.30, 0.31], 0.0) == pytest.approx(4.3027 * (1e-4 / 3) ** 0.5, rel=1e-3)

"""Intervals that count runs and problems: worked values, an invariance, and their errors on made-up runs."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.evidence.statistics import Noise, difference, noise, power, problem_variance, seeds_needed, verdict
from tests.benchmarks.evidence.simulation import intervals, made_up, pairs

AGAINST = {"a": 1.0, "b": -1.0}
EXACT = Noise(variance=0.0, freedom=4, seeds=3)


def answers(text: str) -> np.ndarray:
    return np.array(list(text), dtype=float)


def test_the_noise_is_the_mean_square_of_the_residuals_of_arm_and_seed() -> None:
    # Means of arms 2 and 2, of seeds 1.5 and 2.5, of all 2: residuals -.5, .5, .5, -.5, whose squares sum to 1.
    found = noise({"a": {0: 1.0, 1: 3.0}, "b": {0: 2.0, 1: 2.0}})
    assert found.variance == pytest.approx(1.0)
    assert (found.freedom, found.seeds) == (1, 2)


def test_the_part_of_the_problems_is_taken_out_of_the_noise() -> None:
    # Accuracies .5, 0 and 0, .5: mean square .25. a - b is 1, 1, 0, 0 and the opposite: variance 1/3 over 4 problems,
    # 1/12, of which a residual of two arms has half: 1/24 in each seed.
    right = {"a": {0: answers("1100"), 1: answers("0000")}, "b": {0: answers("0000"), 1: answers("1100")}}
    found = noise({"a": {0: 0.5, 1: 0.0}, "b": {0: 0.0, 1: 0.5}}, right)
    assert found.variance == pytest.approx(0.25 - 1 / 24)
    assert problem_variance(AGAINST, {name: runs[0] for name, runs in right.items()}) == pytest.approx(1 / 12)


def test_noise_of_the_problems_alone_is_none_between_runs() -> None:
    right = {"a": {0: answers("1100"), 1: answers("1100")}, "b": {0: answers("0011"), 1: answers("0011")}}
    assert noise({name: dict.fromkeys((0, 1), 0.5) for name in right}, right).variance == 0.0


def test_an_interval_counts_runs_and_problems() -> None:
    # Of one seed: 2 arms of .01, and .02 of the problems: .04, more than the seeds' own .01. √(.04 / 4) = .1, and the
    # 97.5 % quantile of t with 10 degrees of freedom is 2.228.
    between = Noise(variance=0.01, freedom=10, seeds=4)
    found = difference(AGAINST, [0.1, 0.3, 0.2, 0.2], between=between, problems=[0.02] * 4)
    assert found.variance == pytest.approx(0.04)
    assert (found.low, found.high) == pytest.approx((0.2 - 0.2228, 0.2 + 0.2228), abs=1e-4)
    # The seeds alone: √(.02 / 3 / 4) = .0408, and 3.182 with 3 degrees of freedom.
    assert found.plain_high == pytest.approx(0.2 + 3.182 * 0.0408, abs=1e-4)


def test_arms_noisier_than_the_others_are_judged_by_their_own_spread() -> None:
    found = difference(AGAINST, [-0.4, 0.0, 0.4], between=Noise(variance=0.01, freedom=10, seeds=3))
    assert found.variance == pytest.approx(0.16)


def test_one_seed_is_judged_by_the_noise_of_the_others_and_no_noise_is_no_interval() -> None:
    one = difference(AGAINST, [0.2], between=Noise(variance=0.02, freedom=10, seeds=3))
    assert one.high == pytest.approx(0.2 + 2.228 * 0.2, abs=1e-3)
    assert one.plain_high == math.inf
    assert difference(AGAINST, [0.2], between=Noise(variance=0.0, freedom=0, seeds=1)).low == -math.inf


CELLS = st.lists(st.floats(-1, 1), min_size=9, max_size=9)


@given(CELLS, st.floats(-5, 5), st.booleans())
def test_a_shift_of_all_arms_of_a_seed_changes_no_contrast(cells: list[float], shift: float, lacks_a_run: bool) -> None:
    def judge(by: float) -> list[float]:
        values = {
            arm: {seed: cells[3 * row + seed] + by * (seed == 1) for seed in range(3)} for row, arm in enumerate("abc")
        }
        if lacks_a_run:
            del values["c"][1]
        found = difference(AGAINST, [values["a"][seed] - values["b"][seed] for seed in range(3)], between=noise(values))
        return [found.mean, found.low, found.high]

    assert judge(shift) == pytest.approx(judge(0.0), abs=1e-6)


@pytest.mark.parametrize(
    ("low", "high", "of_difference", "of_none"),
    [
        (0.01, 0.04, "held", "held"),
        (-0.04, -0.01, "contradicted", "held"),
        (-0.01, 0.04, "not told apart", "held"),
        (0.01, 0.2, "held", "not told apart"),
        (0.06, 0.2, "held", "contradicted"),
        (-0.2, -0.06, "contradicted", "contradicted"),
        (-0.2, 0.2, "not told apart", "not told apart"),
    ],
)
def test_a_verdict_is_the_place_of_the_interval(low: float, high: float, of_difference: str, of_none: str) -> None:
    wide = (high - low) / 2 / 2.776  # the 97.5 % quantile of t with 4 degrees of freedom
    between = Noise(variance=3 * wide**2 / 2, freedom=4, seeds=3)
    found = difference(AGAINST, [(low + high) / 2] * 3, between=between)
    assert (found.low, found.high) == pytest.approx((low, high), abs=1e-4)
    assert verdict(found, expected=0.1) == of_difference
    assert verdict(found, margin=0.05) == of_none


def test_the_number_of_seeds_is_the_first_with_enough_power() -> None:
    between = Noise(variance=0.0025, freedom=22, seeds=3)
    needed = seeds_needed(0.1, variance=0.006, between=between)
    assert needed is not None
    for seeds, enough in ((needed - 1, False), (needed, True)):
        assert (power(0.1 / math.sqrt(0.006 / seeds), seeds=seeds, freedom=11 * (seeds - 1)) >= 0.8) is enough
    # With much freedom and a large own spread the textbook's (1.96 + .84)² · .006 / .1² = 4.7 is a lower bound.
    assert 4.7 < needed < 10
    assert seeds_needed(0.1, variance=0.006, between=between, is_margin=True) > needed
    assert seeds_needed(0.001, variance=0.006, between=between) is None
    assert seeds_needed(0.1, variance=0.006, between=Noise(variance=0.0, freedom=0, seeds=1)) is None
    assert seeds_needed(0.1, variance=0.0, between=EXACT) == 2


@pytest.mark.parametrize("is_margin", [False, True])
def test_the_power_counts_both_variances(is_margin: bool) -> None:
    rng, draws = np.random.default_rng(0), 40_000
    larger = np.maximum(rng.chisquare(8, draws) / 8, rng.chisquare(2, draws) / 2)
    half = 2.306 * np.sqrt(larger)  # the 97.5 % quantile of t with 8 degrees of freedom
    mean = rng.normal(size=draws)
    found = (abs(mean) + half < 4.0) if is_margin else (mean + 4.0 - half > 0.0)
    assert power(4.0, seeds=3, freedom=8, is_margin=is_margin) == pytest.approx(found.mean(), abs=0.01)


@pytest.mark.parametrize("seeds", [3, 5])
@pytest.mark.parametrize("ratio", [1.0, 3.0])
def test_few_families_of_contrasts_have_a_false_alarm(seeds: int, ratio: float) -> None:
    """5 % at most is the aim; of 120 families 12 or more come by chance in one of 60 tests if it is reached."""
    unequal = np.where(np.arange(8) % 2, 1.0, ratio)
    sds, rng = 0.05 * unequal / np.sqrt((unequal**2).mean()), np.random.default_rng(0)
    alarms = [
        any(found.low > 0.0 or found.high < 0.0 for found in intervals(runs, pairs(8)))
        for runs in (made_up(sds, seeds=seeds, gain=0.0, rng=rng) for _ in range(120))
    ]
    assert sum(alarms) < 12


def test_the_power_is_that_of_made_up_runs() -> None:
    rng, contrasts = np.random.default_rng(0), pairs(8)
    held = [intervals(made_up([0.05] * 8, seeds=4, gain=0.15, rng=rng), contrasts)[0].low > 0.0 for _ in range(200)]
    # Beyond 2 · .05² a pair of accuracies of .3 and .45 has about .0014 of 200 problems, of which half is shared.
    predicted = power(0.15 / math.sqrt(0.0064 / 4), seeds=4, freedom=21, alpha=0.05 / len(contrasts))
    assert np.mean(held) == pytest.approx(predicted, abs=0.11)

"""Intervals that count runs and problems: worked values, an invariance, and their errors on made-up runs."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from benchmarks.evidence.statistics import Noise, difference, noise, power, problem_variance, seeds_needed, verdict
from tests.benchmarks.evidence.simulation import intervals, made_up, pairs

AGAINST = {"a": 1.0, "b": -1.0}


def alike(variance: float, *, freedom: float, seeds: int = 3) -> Noise:
    """Noise of two arms that are pooled with others."""
    arms = dict.fromkeys("ab", variance)
    return Noise(variance=variance, freedom=freedom, arms=arms, residual_freedom=int(freedom), seeds=seeds)


def test_the_variance_of_a_contrast_over_problems_is_that_of_pairs() -> None:
    # a - b is 1, 1, 0, 0: variance 1/3 over 4 problems.
    right = {name: np.array(list(text), dtype=float) for name, text in (("a", "1100"), ("b", "0000"))}
    assert problem_variance(AGAINST, right) == pytest.approx(1 / 12)


def test_equal_arms_are_pooled() -> None:
    # Residuals of both from arm + seed are -.75 and .75.
    found = noise({"a": {0: 1.0, 1: 3.0}, "b": {0: 3.0, 1: 2.0}})
    assert (found.freedom, found.residual_freedom, found.seeds) == (1.0, 1, 2)
    assert found.arms["a"] == pytest.approx(found.arms["b"])


def test_the_prior_is_that_of_which_variances_were_drawn() -> None:
    """A scaled inverse chi-square distribution with s0² = 0.01 and d0 = 6, from 400 arms of 5 seeds."""
    rng = np.random.default_rng(0)
    sds = np.sqrt(0.01 * 6 / rng.chisquare(6, 400))
    runs = rng.normal(size=(400, 5)) * sds[:, None]
    found = noise({str(arm): dict(enumerate(map(float, values))) for arm, values in enumerate(runs)})
    assert found.freedom == pytest.approx(6, rel=0.3)
    assert found.variance == pytest.approx(0.01, rel=0.1)
    # Each arm's variance goes most of the way from its own, with 4 degrees of freedom, to s0².
    own = {str(arm): float(np.var(values, ddof=1)) for arm, values in enumerate(runs)}
    expected = {arm: (6 * 0.01 + 4 * each) / 10 for arm, each in own.items()}
    errors = [found.arms[arm] / each for arm, each in expected.items()]
    assert float(np.median(errors)) == pytest.approx(1.0, abs=0.1)


def test_an_arm_whose_runs_are_equal_says_nothing_of_the_others() -> None:
    values = {"a": {0: 1.0, 1: 3.0, 2: 1.5}, "b": {0: 2.0, 1: 2.5, 2: 3.0}}
    alone = noise(values)
    beside = noise(values | {"none": dict.fromkeys(range(3), 0.0), "once": {0: 9.0}})
    assert (beside.variance, beside.freedom) == (alone.variance, alone.freedom)
    twice = noise(values | {"twice": {0: 2.0, 1: 2.7}})
    assert twice.arms["twice"] != alone.variance
    assert twice.freedom == twice.residual_freedom
    assert beside.arms["none"] < alone.variance
    assert beside.arms["once"] == pytest.approx(alone.variance)


def test_one_complete_arm_among_others_is_no_spread_of_variances() -> None:
    found = noise({"a": {0: 1.0, 1: 3.0, 2: 1.5}, "b": {0: 2.0, 1: 2.5}, "c": {1: 0.5, 2: 0.9}})
    assert found.residual_freedom == 2
    assert min(found.arms.values()) > 0.0


def test_an_interval_counts_runs() -> None:
    # 2 arms of .01: √(.02 / 4) = .0707, and the 97.5 % quantile of t with 10 + 3 degrees of freedom is 2.160.
    found = difference(AGAINST, [0.1, 0.3, 0.2, 0.2], between=alike(0.01, freedom=10))
    assert found.variance == pytest.approx(0.02)
    assert (found.low, found.high) == pytest.approx((0.2 - 0.1527, 0.2 + 0.1527), abs=1e-4)
    # The seeds alone: √(.02 / 3 / 4) = .0408, and 3.182 with 3 degrees of freedom.
    assert found.plain_high == pytest.approx(0.2 + 3.182 * 0.0408, abs=1e-4)


def test_an_interval_is_never_narrower_than_the_problems_alone_allow() -> None:
    found = difference(AGAINST, [0.1, 0.3], between=alike(0.01, freedom=10), problems=[0.08, 0.04])
    assert found.variance == pytest.approx(0.06)


def test_arms_noisier_than_the_others_are_judged_by_their_own_spread() -> None:
    found = difference(AGAINST, [-0.4, 0.0, 0.4], between=alike(0.01, freedom=2))
    assert found.variance == pytest.approx(0.16)


def test_one_seed_is_judged_by_the_noise_of_the_others_and_no_noise_is_no_interval() -> None:
    one = difference(AGAINST, [0.2], between=alike(0.02, freedom=10))
    assert one.high == pytest.approx(0.2 + 2.228 * 0.2, abs=1e-3)
    assert one.plain_high == math.inf
    assert difference(AGAINST, [0.2], between=noise({"a": {0: 0.5}, "b": {0: 0.3}})).low == -math.inf


def test_what_never_varies_is_exact() -> None:
    between = noise({"a": dict.fromkeys(range(3), 5.0), "b": dict.fromkeys(range(3), 3.0)})
    found = difference(AGAINST, [2.0] * 3, between=between)
    assert (found.low, found.high) == (2.0, 2.0)


CELLS = st.lists(st.floats(-1, 1), min_size=9, max_size=9)


@given(CELLS, st.floats(-5, 5), st.booleans())
def test_a_shift_of_all_arms_of_a_seed_changes_no_contrast(cells: list[float], shift: float, lacks_a_run: bool) -> None:
    def judge(by: float) -> list[float]:
        values = {
            arm: {seed: cells[3 * row + seed] + by * (seed == 1) for seed in range(3)} for row, arm in enumerate("abc")
        }
        if lacks_a_run:
            del values["c"][1]
        assume(all(np.ptp(list(runs.values())) > 1e-3 for runs in values.values()))  # equal runs have no noise
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
    wide = (high - low) / 2 / 2.447  # the 97.5 % quantile of t with 6 degrees of freedom
    between = alike(3 * wide**2 / 2, freedom=4)
    found = difference(AGAINST, [(low + high) / 2] * 3, between=between)
    assert (found.low, found.high) == pytest.approx((low, high), abs=1e-4)
    assert verdict(found, expected=0.1) == of_difference
    assert verdict(found, margin=0.05) == of_none


def test_the_number_of_seeds_is_the_first_with_enough_power() -> None:
    between = alike(0.0025, freedom=22)
    needed = seeds_needed(0.1, variance=0.006, between=between)
    assert needed is not None
    for seeds, enough in ((needed - 1, False), (needed, True)):
        assert (power(0.1 / math.sqrt(0.006 / seeds), seeds=seeds, freedom=12 * (seeds - 1)) >= 0.8) is enough
    # With much freedom the textbook's (1.96 + .84)² · .006 / .1² = 4.7 is a lower bound.
    assert 4.7 < needed < 10
    assert seeds_needed(0.1, variance=0.006, between=between, is_margin=True) > needed
    assert seeds_needed(0.001, variance=0.006, between=between) is None
    assert seeds_needed(0.1, variance=0.006, between=Noise(seeds=1)) is None
    assert seeds_needed(0.1, variance=0.0, between=between) == 2
    # Arms of their own need more: their d0 does not grow with the seeds.
    unlike = Noise(variance=0.0025, freedom=2, arms={}, residual_freedom=22, seeds=3)
    assert seeds_needed(0.1, variance=0.006, between=unlike) > needed


@pytest.mark.parametrize("is_margin", [False, True])
def test_the_power_counts_both_variances(is_margin: bool) -> None:
    rng, draws = np.random.default_rng(0), 40_000
    larger = np.maximum(rng.chisquare(8, draws) / 8, rng.chisquare(2, draws) / 2)
    half = 2.306 * np.sqrt(larger)  # the 97.5 % quantile of t with 8 degrees of freedom
    mean = rng.normal(size=draws)
    found = (abs(mean) + half < 4.0) if is_margin else (mean + 4.0 - half > 0.0)
    assert power(4.0, seeds=3, freedom=8, is_margin=is_margin) == pytest.approx(found.mean(), abs=0.01)


@pytest.mark.parametrize("seeds", [3, 5])
@pytest.mark.parametrize("noisier", [(), (1, 3, 5, 7), (2,)])
def test_few_families_of_contrasts_have_a_false_alarm(seeds: int, noisier: tuple[int, ...]) -> None:
    """5 % at most is the aim; of 120 families 12 or more come by chance in one of 60 tests if it is reached."""
    sds, rng = np.where(np.isin(np.arange(8), noisier), 0.12, 0.04), np.random.default_rng(0)
    alarms = [
        any(found.low > 0.0 or found.high < 0.0 for found in intervals(runs, pairs(8)))
        for runs in (made_up(sds, seeds=seeds, gain=0.0, rng=rng) for _ in range(120))
    ]
    assert sum(alarms) < 12


def test_the_power_is_that_of_made_up_runs() -> None:
    rng, contrasts = np.random.default_rng(0), pairs(8)
    held = [intervals(made_up([0.05] * 8, seeds=4, gain=0.15, rng=rng), contrasts)[0].low > 0.0 for _ in range(200)]
    # Beyond 2 · .05² a pair of accuracies of .3 and .45 has about .0014 of 200 problems, of which half is shared.
    predicted = power(0.15 / math.sqrt(0.0064 / 4), seeds=4, freedom=24, alpha=0.05 / len(contrasts))
    assert np.mean(held) == pytest.approx(predicted, abs=0.11)

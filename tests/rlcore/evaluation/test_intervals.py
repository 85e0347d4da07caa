"""Intervals of shares and means, calibration error, and limits that one model has to meet."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcore.errors import DataError, NonFiniteError
from rlcore.evaluation.intervals import (
    accuracy,
    effective_sample_size,
    expected_calibration_error,
    mean_fraction,
    pair_accuracy,
    pass_at_k,
)
from rlcore.evaluation.promotion import check_max, check_min

verdicts = st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=60)


def test_wilson_interval_of_eight_in_ten() -> None:
    """z² = 3.8415, n = 10, p = 0.8: centre (0.8 + 0.192073) / 1.384146 = 0.716740,
    half 1.959964 / 1.384146 * sqrt(0.016 + 0.0096036) = 0.226577."""
    interval = accuracy([1] * 8 + [0] * 2)
    assert (interval.mean, interval.n) == (0.8, 10)
    assert interval.low == pytest.approx(0.490163, abs=1e-5)
    assert interval.high == pytest.approx(0.943317, abs=1e-5)


def test_wilson_interval_of_none_right() -> None:
    """p = 0: low 0, high z² / (n + z²) = 3.8415 / 13.8415."""
    interval = accuracy([False] * 10)
    assert interval.low == 0.0
    assert interval.high == pytest.approx(0.277535, abs=1e-5)


@given(verdicts, st.sampled_from([0.5, 0.9, 0.99]))
def test_interval_contains_mean_and_grows_with_confidence(values: list[float], confidence: float) -> None:
    narrow, wide = accuracy(values, confidence=confidence), accuracy(values, confidence=0.999)
    assert 0.0 <= wide.low <= narrow.low <= narrow.mean <= narrow.high <= wide.high <= 1.0
    assert narrow.mean == pytest.approx(sum(values) / len(values))


def test_pair_accuracy_by_hand() -> None:
    assert pair_accuracy([2.0, 0.1, -1.0, 0.0]).mean == 0.625


@pytest.mark.parametrize(
    ("n", "c", "k", "chance"),
    # 1 - C(3,2)/C(5,2) = 1 - 3/10; all wrong; fewer wrong than k; k = 1 is c/n; 1 - C(8,4)/C(10,4) = 1 - 70/210
    [(5, 2, 2, 0.7), (4, 0, 3, 0.0), (4, 2, 3, 1.0), (8, 3, 1, 0.375), (10, 2, 4, 2 / 3)],
)
def test_pass_at_k_by_hand(n: int, c: int, k: int, chance: float) -> None:
    assert pass_at_k(n, c, k) == pytest.approx(chance, abs=1e-15)


@pytest.mark.parametrize("case", [(0, 0, 1), (4, 5, 1), (4, -1, 1), (4, 2, 0), (4, 2, 5)])
def test_undefined_pass_at_k_is_refused(case: tuple[int, int, int]) -> None:
    with pytest.raises(DataError, match="not defined"):
        pass_at_k(*case)


def test_equal_shares_are_not_certain() -> None:
    """All 1, with a 0 and a 1 imagined: the number of zeros in a resample of N + 2 is about Poisson(1), 3 at most in
    97.5 %: the interval begins at about 1 - 3 / (N + 2)."""
    for n in (5, 100):
        interval = mean_fraction([1.0] * n, seed=0)
        assert (interval.mean, interval.high) == (1.0, 1.0)
        assert interval.low == pytest.approx(1 - 3 / (n + 2), abs=1.01 / (n + 2))
    assert mean_fraction([0.0], seed=0).high > 0.5
    with pytest.raises(DataError, match=r"outside 0\.\.1"):
        mean_fraction([0.5, 1.5], seed=0)


def test_bootstrap_covers_shares_near_one() -> None:
    """Pass rates of prompts, eight answers each, nine in ten prompts always solved: 400 experiments of 30 prompts."""
    generator = np.random.default_rng(2)
    chances = np.where(generator.random((400, 30)) < 0.9, 1.0, 0.5)
    shares = generator.binomial(8, chances) / 8
    intervals = [mean_fraction(row, seed=number) for number, row in enumerate(shares)]
    assert sum(each.low <= 0.95 <= each.high for each in intervals) / 400 > 0.92


def test_bootstrap_agrees_with_normal_interval() -> None:
    """n = 10,000 uniform values: half width 1.96 · 0.288675 / 100; more values than fit in one chunk of resamples."""
    values = np.random.default_rng(0).random(10_000)
    interval = mean_fraction(values, seed=0)
    assert interval.high - interval.low == pytest.approx(2 * 0.005658, rel=0.1)
    assert interval == mean_fraction(values, seed=0)


def test_effective_sample_size_by_hand() -> None:
    """Two prompts, both of each alike: squares of sums 2 · 2/(2 - 1) over squares 1: effect 4, two values at least.
    One right and one wrong in each: sums 0, effect below 1, all four count. All alike: nobody knows, two."""
    assert effective_sample_size([1, 1, 0, 0], [7, 7, 9, 9]) == 2.0
    assert effective_sample_size([1, 0, 1, 0], [7, 7, 9, 9]) == 4.0
    assert effective_sample_size([1, 1, 1, 1], [7, 7, 9, 9]) == 2.0
    assert effective_sample_size([1, 0, 0], [4, 4, 4]) == 1.0
    # Three prompts with 2, 0 and 1 of 3 right, mean 1/3: squares of sums 2 · 3/(3 - 1) over squares 2: 1.5, so 9 / 1.5.
    assert effective_sample_size([1, 1, 0, 0, 0, 0, 1, 0, 0], [0, 0, 0, 1, 1, 1, 2, 2, 2]) == pytest.approx(6.0)
    with pytest.raises(DataError, match="2 clusters of 3 values"):
        effective_sample_size([1, 0, 0], [4, 4])


def test_clusters_are_needed_for_coverage() -> None:
    """50 prompts of six pairs; a prompt's pairs share its difficulty, Beta(1, 0.5), mean 2/3. 500 experiments."""
    generator = np.random.default_rng(4)
    prompts = np.repeat(np.arange(50), 6)
    told = untold = 0
    for _ in range(500):
        right = (generator.random((50, 6)) < generator.beta(1.0, 0.5, (50, 1))).ravel()
        for_clusters, for_rows = accuracy(right, clusters=prompts), accuracy(right)
        told += for_clusters.low <= 2 / 3 <= for_clusters.high
        untold += for_rows.low <= 2 / 3 <= for_rows.high
    assert told / 500 > 0.92
    assert untold / 500 < 0.8


def test_calibration_error_over_bins() -> None:
    """Bin of σ(0.1) = 0.524979: 1 of 2 right, gap 0.024979; bin of σ(3) = 0.952574: 2 of 2, gap 0.047426."""
    assert expected_calibration_error([0.1, -0.1, 3.0, 3.0]) == pytest.approx((0.024979 + 0.047426) / 2, abs=1e-6)


@pytest.mark.parametrize("figure", [accuracy, expected_calibration_error, pair_accuracy])
def test_empty_and_non_finite_values_are_refused(figure) -> None:
    with pytest.raises(DataError, match="shape"):
        figure([])
    with pytest.raises(NonFiniteError, match="1 of 2"):
        figure([1.0, math.nan])


def test_values_outside_zero_and_one_are_refused() -> None:
    with pytest.raises(DataError, match="outside"):
        accuracy([1.0, 2.0])
    with pytest.raises(DataError, match="confidence"):
        accuracy([1.0], confidence=1.0)


def test_clopper_pearson_by_hand() -> None:
    """Clopper and Pearson, 95 %: 0.4439. Of n in n it is 0.025^(1/n)."""
    assert check_min("share", [1] * 8 + [0] * 2, 0.5).low == pytest.approx(0.4439, abs=1e-4)
    for n in (1, 5, 100):
        check = check_min("share", [1] * n, 0.5)
        assert (check.low, check.high) == (pytest.approx(0.025 ** (1 / n), rel=1e-9), 1.0)
    assert check_min("share", [0] * 5, 0.0).low == 0.0


@pytest.mark.parametrize("limit", [0.3, 0.7, 0.95])
@pytest.mark.parametrize("n", [1, 5, 50])
def test_share_at_limit_keeps_level(n: int, limit: float) -> None:
    """Sum the chances of the passing counts; Wilson's interval gave up to 0.09 here."""
    passing = [right for right in range(n + 1) if check_min("share", [1] * right + [0] * (n - right), limit).passed]
    level = sum(math.comb(n, right) * limit**right * (1.0 - limit) ** (n - right) for right in passing)
    assert level <= 0.025 + 1e-9


def test_ties_and_clusters_lower_the_bound() -> None:
    assert check_min("share", [1, 1, 1, 0.5], 0.1).low == check_min("share", [1, 1, 1, 0], 0.1).low
    alone, together = (check_min("share", [1] * 60, 0.5, clusters=each) for each in (range(60), [0, 1] * 30))
    assert alone.low == pytest.approx(0.025 ** (1 / 60))
    assert together.low == pytest.approx(0.025 ** (1 / 2))  # two prompts


@pytest.mark.parametrize(
    ("sizes", "num_clusters", "limit", "alike"),
    [((5,), 30, 0.95, 0.4), ((1, 3, 9), 10, 0.8, 0.9), ((2, 2, 2, 20), 100, 0.9, 0.1)],
)
def test_clusters_at_limit_keep_level(sizes: tuple[int, ...], num_clusters: int, limit: float, alike: float) -> None:
    """Right with a chance that each cluster draws (Beta, correlation ``alike``); 43 of 1,000 come once in 1,000."""
    generator, passed = np.random.default_rng(0), 0
    size = np.array([sizes[place % len(sizes)] for place in range(num_clusters)])
    clusters = np.repeat(np.arange(num_clusters), size)
    spread = 1.0 / alike - 1.0
    for _ in range(1_000):
        chances = generator.beta(limit * spread, (1.0 - limit) * spread, num_clusters)
        right = (generator.random(len(clusters)) < chances[clusters]).astype(float)
        passed += check_min("share", right, limit, clusters=clusters).passed  # type: ignore[arg-type]  # arrays will do
    assert passed <= 42


def test_uncorrelated_clusters_count_nearly_fully() -> None:
    """200 clusters of five uncorrelated values, 80 % right, count as 800 at least."""
    right = [float(place % 5 != place // 5 % 5) for place in range(1_000)]
    check = check_min("share", right, 0.7, clusters=[place // 5 for place in range(1_000)])
    assert check.low >= check_min("share", right[:800], 0.7).low


def test_nan_meets_no_limit() -> None:
    assert check_max("KL", 0.2, 0.2).passed
    assert not check_max("KL", math.nan, 0.2).passed

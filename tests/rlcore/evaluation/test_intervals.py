"""Figures with their uncertainty: golden values by hand, laws, and intervals that cover what they promise."""

from __future__ import annotations

import itertools
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

verdicts = st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=60)
samples = st.integers(1, 30).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n)))


def test_the_wilson_interval_of_eight_in_ten() -> None:
    """z² = 3.8415, n = 10, p = 0.8: centre (0.8 + 0.192073) / 1.384146 = 0.716740,
    half 1.959964 / 1.384146 * sqrt(0.016 + 0.0096036) = 0.226577."""
    interval = accuracy([1] * 8 + [0] * 2)
    assert (interval.mean, interval.n) == (0.8, 10)
    assert interval.low == pytest.approx(0.490163, abs=1e-5)
    assert interval.high == pytest.approx(0.943317, abs=1e-5)


def test_the_wilson_interval_of_none_right_ends_at_z2_over_n_plus_z2() -> None:
    """p = 0: low 0, high z² / (n + z²) = 3.8415 / 13.8415."""
    interval = accuracy([False] * 10)
    assert interval.low == 0.0
    assert interval.high == pytest.approx(0.277535, abs=1e-5)


@given(verdicts, st.sampled_from([0.5, 0.9, 0.99]))
def test_an_interval_holds_its_mean_and_grows_with_confidence(values: list[float], confidence: float) -> None:
    narrow, wide = accuracy(values, confidence=confidence), accuracy(values, confidence=0.999)
    assert 0.0 <= wide.low <= narrow.low <= narrow.mean <= narrow.high <= wide.high <= 1.0
    assert narrow.mean == pytest.approx(sum(values) / len(values))


@given(verdicts)
def test_right_and_wrong_swapped_mirror_the_interval(values: list[float]) -> None:
    interval, mirrored = accuracy(values), accuracy([1.0 - value for value in values])
    assert interval.low == pytest.approx(1.0 - mirrored.high, abs=1e-12)


def test_pair_accuracy_counts_positive_margins_and_half_of_the_ties() -> None:
    assert pair_accuracy([2.0, 0.1, -1.0, 0.0]).mean == 0.625


@pytest.mark.parametrize(
    ("n", "c", "k", "chance"),
    # 1 - C(3,2)/C(5,2) = 1 - 3/10; all wrong; fewer wrong than k; k = 1 is c/n; 1 - C(8,4)/C(10,4) = 1 - 70/210
    [(5, 2, 2, 0.7), (4, 0, 3, 0.0), (4, 2, 3, 1.0), (8, 3, 1, 0.375), (10, 2, 4, 2 / 3)],
)
def test_pass_at_k_by_hand(n: int, c: int, k: int, chance: float) -> None:
    assert pass_at_k(n, c, k) == pytest.approx(chance, abs=1e-15)


@given(st.integers(1, 8).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(case: tuple[int, int, int]) -> None:
    n, c, k = case
    subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


@given(samples)
def test_more_samples_never_lower_the_chance(case: tuple[int, int, int]) -> None:
    n, c, k = case
    assert pass_at_k(n, c, max(1, k - 1)) <= pass_at_k(n, c, k) <= 1.0


@pytest.mark.parametrize("case", [(0, 0, 1), (4, 5, 1), (4, -1, 1), (4, 2, 0), (4, 2, 5)])
def test_an_undefined_pass_at_k_is_refused(case: tuple[int, int, int]) -> None:
    with pytest.raises(DataError, match="not defined"):
        pass_at_k(*case)


def test_the_bootstrap_is_repeatable_and_narrows_with_more_values() -> None:
    values = np.random.default_rng(3).random(400)
    assert mean_fraction(values, seed=5) == mean_fraction(values, seed=5)
    few, many = mean_fraction(values[:25], seed=5), mean_fraction(values, seed=5)
    assert (few.high - few.low) > 2.5 * (many.high - many.low)  # about 4 = sqrt(400 / 25)


def test_equal_shares_are_no_certainty() -> None:
    """All 1, with a 0 and a 1 imagined: the number of zeros in a resample of N + 2 is about Poisson(1), 3 at most in
    97.5 %: the interval begins at about 1 - 3 / (N + 2)."""
    for n in (5, 100):
        interval = mean_fraction([1.0] * n, seed=0)
        assert (interval.mean, interval.high) == (1.0, 1.0)
        assert interval.low == pytest.approx(1 - 3 / (n + 2), abs=1.01 / (n + 2))
    assert mean_fraction([0.0], seed=0).high > 0.5
    with pytest.raises(DataError, match=r"outside 0\.\.1"):
        mean_fraction([0.5, 1.5], seed=0)


def test_intervals_of_shares_near_the_edge_cover_the_truth() -> None:
    """Pass rates of prompts, eight answers each, nine in ten prompts always solved: 400 experiments of 30 prompts."""
    generator = np.random.default_rng(2)
    chances = np.where(generator.random((400, 30)) < 0.9, 1.0, 0.5)
    shares = generator.binomial(8, chances) / 8
    intervals = [mean_fraction(row, seed=number) for number, row in enumerate(shares)]
    assert sum(each.low <= 0.95 <= each.high for each in intervals) / 400 > 0.92


def test_the_bootstrap_agrees_with_the_normal_interval() -> None:
    """n = 10,000 uniform values: half width 1.96 · 0.288675 / 100; more values than fit in one chunk of resamples."""
    interval = mean_fraction(np.random.default_rng(0).random(10_000), seed=0)
    assert interval.high - interval.low == pytest.approx(2 * 0.005658, rel=0.1)


def test_values_of_one_prompt_count_as_one_where_they_always_go_together() -> None:
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


def test_intervals_over_many_pairs_of_a_prompt_cover_the_truth_only_if_they_are_told() -> None:
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


def test_wilson_intervals_cover_the_truth_as_often_as_they_say() -> None:
    """2,000 experiments of 100 problems; the standard error of the coverage itself is 0.005."""
    generator = np.random.default_rng(0)
    for truth in (0.05, 0.5, 0.9):
        counts, repeats = np.unique(generator.binomial(100, truth, 2_000), return_counts=True)
        intervals = [accuracy([1] * count + [0] * (100 - count)) for count in counts]
        covered = sum(n for i, n in zip(intervals, repeats, strict=True) if i.low <= truth <= i.high) / 2_000
        assert 0.92 < covered < 0.99


def test_the_calibration_error_by_hand() -> None:
    """σ(2) = 0.880797: four pairs in one bin, 3 right: |0.75 - 0.880797|."""
    assert expected_calibration_error([2.0, 2.0, 2.0, -2.0]) == pytest.approx(0.130797, abs=1e-6)


def test_the_calibration_error_adds_up_over_bins() -> None:
    """Bin of σ(0.1) = 0.524979: 1 of 2 right, gap 0.024979; bin of σ(3) = 0.952574: 2 of 2, gap 0.047426."""
    assert expected_calibration_error([0.1, -0.1, 3.0, 3.0]) == pytest.approx((0.024979 + 0.047426) / 2, abs=1e-6)


def test_a_model_that_knows_nothing_and_says_so_is_calibrated() -> None:
    assert expected_calibration_error([0.0] * 10) == 0.0


def test_margins_drawn_as_they_say_are_calibrated_and_doubled_ones_are_not() -> None:
    generator = np.random.default_rng(0)
    strength = generator.normal(scale=1.5, size=20_000)
    right = generator.random(20_000) < 1 / (1 + np.exp(-np.abs(strength)))
    margins = np.where(right, np.abs(strength), -np.abs(strength))
    assert expected_calibration_error(margins) < 0.02
    assert expected_calibration_error(3 * margins) > 0.08


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50))
def test_a_calibration_error_is_a_probability(margins: list[float]) -> None:
    assert 0.0 <= expected_calibration_error(margins) <= 1.0


@pytest.mark.parametrize("figure", [accuracy, expected_calibration_error, pair_accuracy])
def test_no_values_and_values_that_are_no_numbers_are_refused(figure) -> None:
    with pytest.raises(DataError, match="shape"):
        figure([])
    with pytest.raises(NonFiniteError, match="1 of 2"):
        figure([1.0, math.nan])


def test_what_is_no_verdict_is_refused() -> None:
    with pytest.raises(DataError, match="outside"):
        accuracy([1.0, 2.0])
    with pytest.raises(DataError, match="confidence"):
        accuracy([1.0], confidence=1.0)

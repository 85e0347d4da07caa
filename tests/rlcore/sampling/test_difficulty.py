"""Drawing by difficulty: known weights, and laws of how often an item comes."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcore.sampling.difficulty import PassCount, learnability, repeat_counts, sample_by_difficulty

ANSWERS = 8
tried = st.integers(1, 64).flatmap(lambda n: st.integers(0, n).map(lambda k: PassCount(passed=k, answers=n)))
weights = st.lists(tried.map(learnability), min_size=1, max_size=40)


def test_learnability_is_the_mean_of_the_variance_over_the_posterior() -> None:
    # 8 answers, 4 right: Beta(5, 5), 5 * 5 / (10 * 11); none right: Beta(1, 9), 1 * 9 / (10 * 11)
    assert learnability(PassCount(passed=4, answers=8)) == Fraction(25, 110)
    assert learnability(PassCount(passed=0, answers=8)) == Fraction(9, 110)
    # by quadrature: the mean of p(1 - p) under p^6 (1 - p)^2, normalised
    grid = [(place + 0.5) / 20_000 for place in range(20_000)]
    density = [p**6 * (1 - p) ** 2 for p in grid]
    mean = sum(d * p * (1 - p) for d, p in zip(density, grid, strict=True)) / sum(density)
    assert float(learnability(PassCount(passed=6, answers=8))) == pytest.approx(mean, rel=1e-6)


@given(tried)
def test_learnability_is_the_same_for_right_and_wrong_and_highest_in_the_middle(one: PassCount) -> None:
    other = PassCount(passed=one.answers - one.passed, answers=one.answers)
    assert learnability(one) == learnability(other)
    assert (
        0 < learnability(one) <= learnability(PassCount(passed=one.answers // 2, answers=one.answers)) < Fraction(1, 4)
    )


@given(weights, st.integers(0, 2**40))
def test_every_item_comes_as_often_as_its_weight_says_up_to_one(given_weights: list[Fraction], seed: int) -> None:
    counts = repeat_counts(given_weights, seed=seed)
    ratios = [weight / min(given_weights) for weight in given_weights]
    assert all(abs(count - ratio) < 1 for count, ratio in zip(counts, ratios, strict=True))
    assert min(counts) >= 1
    assert abs(sum(counts) - sum(ratios)) < 1
    assert repeat_counts(given_weights, seed=seed) == counts


def test_over_seeds_the_mean_is_the_ratio() -> None:
    found = [repeat_counts([Fraction(9), Fraction(16), Fraction(25)], seed=seed) for seed in range(2_000)]
    means = [sum(each[place] for each in found) / len(found) for place in range(3)]
    # 1, 16 / 9 and 25 / 9; a standard error is at most 0.5 / sqrt(2000) = 0.011
    assert means == pytest.approx([1.0, 16 / 9, 25 / 9], abs=0.05)


@given(st.lists(st.none() | tried, max_size=30), st.floats(0, 1), st.floats(0, 1), st.integers(0, 9))
def test_what_is_drawn_is_known_and_in_the_band_and_keeps_its_order(
    known: list[PassCount | None], one: float, other: float, seed: int
) -> None:
    low, high = min(one, other), max(one, other)
    items = list(range(len(known)))
    inside = [place for place, each in enumerate(known) if each is not None and low <= each.pass_rate <= high]
    even = sample_by_difficulty(items, known, band=(low, high), weight="even", seed=seed)
    learnable = sample_by_difficulty(items, known, band=(low, high), weight="learnability", seed=seed)
    assert even == inside
    assert learnable == sorted(learnable)
    assert list(Counter(learnable)) == inside


def test_an_item_that_is_solved_half_the_time_comes_more_often_than_one_that_never_is() -> None:
    known = [PassCount(passed=passed, answers=ANSWERS) for passed in (0, 4)] * 90
    counts = Counter(
        place % 2 for place in sample_by_difficulty(range(180), known, band=(0, 1), weight="learnability", seed=3)
    )
    assert (counts[0], counts[1]) == (90, 250)  # 25 / 9 as often

"""Conditions on one model alone: values by hand, and the level exactly at the limit, by enumeration."""

from __future__ import annotations

import math

import numpy as np
import pytest

from rlcore.evaluation.conditions import check_max, check_min


def test_the_lower_end_of_eight_in_ten_is_that_of_the_tables() -> None:
    """Clopper and Pearson, 95 %: 0.4439. Of n in n it is 0.025^(1/n)."""
    assert check_min("share", [1] * 8 + [0] * 2, 0.5).low == pytest.approx(0.4439, abs=1e-4)
    for n in (1, 5, 100):
        check = check_min("share", [1] * n, 0.5)
        assert (check.low, check.high) == (pytest.approx(0.025 ** (1 / n), rel=1e-9), 1.0)
    assert check_min("share", [0] * 5, 0.0).low == 0.0


@pytest.mark.parametrize("limit", [0.3, 0.5, 0.7, 0.85, 0.95])
@pytest.mark.parametrize("n", [1, 2, 5, 10, 50, 100])
def test_a_share_of_exactly_the_limit_passes_no_more_often_than_the_level(n: int, limit: float) -> None:
    """Sum the chances of the passing counts; Wilson's interval gave up to 0.09 here."""
    passing = [right for right in range(n + 1) if check_min("share", [1] * right + [0] * (n - right), limit).passed]
    level = sum(math.comb(n, right) * limit**right * (1.0 - limit) ** (n - right) for right in passing)
    assert level <= 0.025 + 1e-9


def test_ties_count_half_rounded_to_the_safe_side_and_pairs_of_a_prompt_as_fewer() -> None:
    assert check_min("share", [1, 1, 1, 0.5], 0.1).low == check_min("share", [1, 1, 1, 0], 0.1).low
    alone, together = (check_min("share", [1] * 60, 0.5, clusters=each) for each in (range(60), [0, 1] * 30))
    assert alone.low == pytest.approx(0.025 ** (1 / 60))
    assert together.low == pytest.approx(0.025 ** (1 / 2))  # two prompts


@pytest.mark.parametrize("sizes", [(5,), (1, 3, 9), (2, 2, 2, 20)])
@pytest.mark.parametrize(("num_clusters", "limit", "alike"), [(30, 0.95, 0.4), (10, 0.8, 0.9), (100, 0.9, 0.1)])
def test_clusters_of_exactly_the_limit_pass_no_more_often_than_the_level(
    sizes: tuple[int, ...], num_clusters: int, limit: float, alike: float
) -> None:
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


def test_clusters_of_one_value_each_are_independent_values() -> None:
    values = [1] * 57 + [0] * 3
    assert check_min("share", values, 0.5, clusters=range(60)).low == check_min("share", values, 0.5).low


def test_many_clusters_with_many_wrong_are_told_apart_from_few() -> None:
    """200 clusters of five uncorrelated values, 80 % right, count as 800 at least."""
    right = [float(place % 5 != place // 5 % 5) for place in range(1_000)]
    check = check_min("share", right, 0.7, clusters=[place // 5 for place in range(1_000)])
    assert check.low >= check_min("share", right[:800], 0.7).low


def test_no_limit_is_met_by_what_is_not_a_number() -> None:
    assert check_max("KL", 0.2, 0.2).passed
    assert not check_max("KL", math.nan, 0.2).passed

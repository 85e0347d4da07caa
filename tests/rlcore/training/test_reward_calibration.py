"""Calibration, length and ranks: golden values by hand, and intervals that respect prompts."""

from __future__ import annotations

import math

import numpy as np
import pytest

from rlcore.training.reward_calibration import (
    accuracy_by_length,
    brier_score,
    calibration_interval,
    cluster_bootstrap,
    correlation,
    fit_temperature,
    reliability_table,
    within_groups,
)


def test_the_reliability_table_counts_each_pair_once() -> None:
    # σ(0.1) = 0.525 and σ(-0.1): first bin, certainty 0.525, one of two right. σ(3) = 0.9526: the last but none.
    rows = reliability_table(np.array([0.1, -0.1, 3.0]), np.arange(3))
    assert [(row.num_pairs, row.low) for row in rows] == [(2, 0.5), (1, 0.95)]
    assert rows[0].confidence == pytest.approx(0.524979, abs=1e-6)
    assert (rows[0].accuracy.mean, rows[1].accuracy.mean) == (0.5, 1.0)


def test_pairs_of_one_prompt_do_not_count_as_many() -> None:
    margins, prompts = np.tile([2.0, 2.0, 2.0, -2.0], 25), np.repeat(np.arange(25), 4)
    alike = np.repeat([2.0, 2.0, 2.0, -2.0], 25)
    (mixed,), (together,) = (reliability_table(each, prompts) for each in (margins, alike))
    assert mixed.accuracy.mean == together.accuracy.mean == 0.75
    assert together.accuracy.high - together.accuracy.low > 1.5 * (mixed.accuracy.high - mixed.accuracy.low)
    parts = [accuracy_by_length(each, np.ones(100), prompts)["longer"] for each in (margins, alike)]
    assert [(part.low, part.high) for part in parts] == [
        (mixed.accuracy.low, mixed.accuracy.high),
        (together.accuracy.low, together.accuracy.high),
    ]


def test_brier_by_hand() -> None:
    # (1 - 0.5)² = 0.25 and (1 - 0.75)² = 0.0625: mean 0.15625
    assert brier_score(np.array([0.0, math.log(3.0)])) == pytest.approx(0.15625)


def test_the_temperature_makes_stated_and_real_hit_rates_equal() -> None:
    # Three right and one wrong at margin 4: σ(4 / T) = 3/4 at 4 / T = ln 3, so T = 3.640957.
    assert fit_temperature(np.array([4.0, 4.0, 4.0, -4.0])) == pytest.approx(3.640957, abs=1e-4)


@pytest.mark.parametrize(("margins", "bound"), [([1.0, 2.0], math.exp(-4)), ([-1.0, -2.0], math.exp(4))])
def test_a_model_that_is_always_right_or_always_wrong_gets_the_bound(margins: list[float], bound: float) -> None:
    assert fit_temperature(np.array(margins)) == pytest.approx(bound, rel=1e-4)


def test_honest_margins_have_temperature_one_and_a_small_calibration_error() -> None:
    generator = np.random.default_rng(0)
    size = generator.exponential(1.5, 4000)
    margins = np.where(generator.random(4000) < 1 / (1 + np.exp(-size)), size, -size)
    assert fit_temperature(margins) == pytest.approx(1.0, abs=0.1)
    honest, boasting = (
        calibration_interval(one, np.arange(4000), seed=0, confidence=0.95) for one in (margins, 3 * margins)
    )
    assert honest.high < boasting.low
    assert honest.mean < 0.03


def test_rows_of_one_prompt_make_the_interval_wider_than_rows_apart() -> None:
    values = np.repeat(np.random.default_rng(0).normal(size=40), 10)
    apart, together = (
        cluster_bootstrap(lambda rows: float(values[rows].mean()), clusters, seed=0)
        for clusters in (np.arange(400), np.repeat(np.arange(40), 10))
    )
    assert together.high - together.low > 2.5 * (apart.high - apart.low)  # sqrt(10) = 3.2


def test_correlation_by_hand_and_without_variation() -> None:
    # x - 2 = -1, 0, 1; y - 3 = -1, -1, 2: 3 / sqrt(2 * 6) = 0.866025
    assert correlation(np.array([1.0, 2.0, 3.0]), np.array([2.0, 2.0, 5.0])) == pytest.approx(0.866025, abs=1e-6)
    assert correlation(np.ones(3), np.arange(3.0)) == 0.0


def test_within_a_group_its_mean_is_gone() -> None:
    assert within_groups(np.array([1.0, 5.0, 3.0, 7.0]), np.array([8, 2, 8, 2])).tolist() == [-1.0, -1.0, 1.0, 1.0]


def test_accuracy_is_split_by_which_side_is_longer() -> None:
    parts = accuracy_by_length(np.array([1.0, 1.0, -1.0, -1.0]), np.array([0.5, 0.1, -0.2, 0.3]), np.arange(4))
    assert {name: (part.mean, part.n) for name, part in parts.items()} == {
        "longer": (pytest.approx(2 / 3), 3),
        "shorter": (0.0, 1),
    }

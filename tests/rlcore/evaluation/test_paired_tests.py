"""Paired shares: values by hand, a slow reference, and the level exactly at the margin, by enumeration."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.errors import DataError
from rlcore.evaluation.intervals import accuracy
from rlcore.evaluation.paired_tests import (
    chance_of_score,
    mcnemar_p,
    min_sample_size,
    noninferiority_p,
    paired_difference,
    score_interval,
)

counts = st.integers(1, 40).flatmap(
    lambda n: st.integers(0, n).flatmap(lambda won: st.tuples(st.just(won), st.integers(0, n - won), st.just(n)))
)


def chances(q: float, change: float, won: np.ndarray, lost: np.ndarray, n: int) -> np.ndarray:
    """Return the chance of each outcome if "only the old one" has q and "only the new one" q + change."""
    logs = [math.log(max(p, 1e-300)) for p in (q + change, q, 1.0 - 2.0 * q - change)]
    gamma = np.array([math.lgamma(k + 1) for k in range(n + 1)])
    neither = n - won - lost
    weights = gamma[n] - gamma[won] - gamma[lost] - gamma[neither]
    return np.exp(weights + won * logs[0] + lost * logs[1] + neither * logs[2])


def slow_score(won: int, lost: int, n: int, change: float) -> float:
    """Tango's statistic with the likeliest q looked for on a fine grid in place of the formula."""
    q = np.linspace(max(0.0, -change), (1.0 - change) / 2.0, 20_001)[1:-1]
    log_likelihood = won * np.log(q + change) + lost * np.log(q) + (n - won - lost) * np.log(1.0 - 2.0 * q - change)
    best = float(q[log_likelihood.argmax()])
    return (won - lost - n * change) / math.sqrt(n * (2.0 * best + change * (1.0 - change)))


@pytest.mark.parametrize(
    ("case", "confidence", "low", "high"),
    [
        # Cavo et al. 2012: n12 = 6, n21 = 16 of 161; as the R package contingencytables 3.0 prints it (Fagerland,
        # Lydersen & Laake, Statistical Analysis of Contingency Tables, chapter 8)
        ((6, 16, 161), 0.95, -0.1240, -0.0054),
        ((28, 25, 618), 0.90, -0.0148, 0.0247),  # scoreci.mp(25, 28, 618) of the R package PropCIs 0.3
    ],
)
def test_tango_interval_equals_published(
    case: tuple[int, int, int], confidence: float, low: float, high: float
) -> None:
    assert score_interval(*case, confidence=confidence) == (pytest.approx(low, abs=5e-5), pytest.approx(high, abs=5e-5))


def test_superiority_p_equals_published() -> None:
    """floor(Cavo et al. 2012 / 10): 1 won, 0 lost of 14. contingencytables 3.0 prints the two-sided P = 0.542071, which
    has 0.0001 for the part of the chances that it leaves out. Its two sides are equal."""
    assert 2.0 * noninferiority_p(1, 0, 14, 0.0) == pytest.approx(0.542071 - 0.0001, abs=2e-6)


@pytest.mark.parametrize("n", [12, 40, 200])
@pytest.mark.parametrize("alpha", [0.025, 0.05 / 30])
def test_superiority_keeps_level(n: int, alpha: float) -> None:
    """Every outcome is weighed, at discordances off the grid; the conditional test (McNemar) says it less often."""
    won, lost = np.repeat(np.arange(n + 1), n + 1), np.tile(np.arange(n + 1), n + 1)
    is_possible = won + lost <= n
    won, lost = won[is_possible], lost[is_possible]
    score = (won - lost) / np.sqrt(np.maximum(won + lost, 1))
    observed = sorted(set(score[score > 0.5].tolist()))
    low, high = 0, len(observed)  # bisect for the smallest score that passes
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if chance_of_score(observed[middle], n, 0.0) <= alpha else (middle + 1, high)
    passes = score >= observed[low] - 1e-9
    conditional = np.array([w > b and mcnemar_p(int(w), int(b)) / 2 <= alpha for w, b in zip(won, lost, strict=True)])
    grid = np.linspace(0.003, 0.5, 60)
    levels, older = (max(float(chances(q, 0.0, won[r], lost[r], n).sum()) for q in grid) for r in (passes, conditional))
    assert older < levels <= 1.001 * alpha


@pytest.mark.parametrize("n", [1, 5, 100])
def test_interval_without_differences_by_hand(n: int) -> None:
    """q = -Δ there, so T² = n Δ / (1 + Δ) = z² at Δ = -z² / (n + z²), z² = 3.8415: 0.434 for five problems."""
    assert score_interval(n, 0, n)[1] == 1.0  # the end beyond is the edge of what can be
    low, high = score_interval(0, 0, n)
    assert (low, high) == (pytest.approx(-3.841459 / (n + 3.841459), abs=1e-6), -low)


@pytest.mark.parametrize("case", [(2, 9, 44), (0, 3, 12), (7, 7, 14)])
def test_interval_ends_equal_slow_score(case: tuple[int, int, int]) -> None:
    low, high = score_interval(*case, confidence=0.9)
    assert slow_score(*case, low) == pytest.approx(1.644854, abs=2e-3)
    assert slow_score(*case, high) == pytest.approx(-1.644854, abs=2e-3)


def test_noninferiority_p_by_hand() -> None:
    """Margin ½, n = 2, T(0, 0): outcomes with T as high are (0, 0), (1, 0), (2, 0), (1, 1), that is all without a loss,
    and one won against one lost, which has change 0 too. P = (1 - q)² + 2 q (q - ½), largest at q = ½: ¼."""
    assert noninferiority_p(0, 0, 2, 0.5) == pytest.approx(0.25, abs=1e-6)


@pytest.mark.parametrize(
    "case", [(0, 0, 30, 0.1), (2, 3, 25, 0.1), (5, 4, 40, 0.05), (1, 0, 12, 0.3), (0, 2, 20, 0.05)]
)
def test_noninferiority_p_equals_enumeration(case: tuple[int, int, int, float]) -> None:
    won, lost, n, margin = case
    places = [(w, b) for w in range(n + 1) for b in range(n + 1 - w)]
    reached = slow_score(won, lost, n, -margin) - 1e-4
    better = np.array([place for place in places if slow_score(*place, n, -margin) >= reached])
    largest = max(
        chances(q, -margin, better[:, 0], better[:, 1], n).sum() for q in np.linspace(margin, (1 + margin) / 2, 400)
    )
    assert noninferiority_p(won, lost, n, margin) == pytest.approx(largest, rel=0.01)


@pytest.mark.parametrize("alpha", [0.025, 0.05 / 30])
@pytest.mark.parametrize(("n", "margin"), [(5, 0.3), (12, 0.3), (40, 0.1)])
def test_loss_of_margin_keeps_level(n: int, margin: float, alpha: float) -> None:
    """Every outcome is weighed by its chance, at discordances off the grid of the test itself."""
    won = np.repeat(np.arange(n + 1), n + 1)
    lost = np.tile(np.arange(n + 1), n + 1)
    passes = np.array([fewest_won(b, n, margin, alpha) for b in range(n + 1)])
    is_passed = (won >= passes[lost]) & (won + lost <= n)
    levels = [
        float(chances(q, -margin, won[is_passed], lost[is_passed], n).sum())
        for q in np.linspace(margin, (1.0 + margin) / 2.0, 30)
    ]
    assert max(levels) <= 1.01 * alpha
    assert n < min_sample_size(margin, alpha) or max(levels) > 0.1 * alpha  # and it is not merely never passed


def fewest_won(lost: int, n: int, margin: float, alpha: float) -> int:
    low, high = 0, n - lost + 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if noninferiority_p(middle, lost, n, margin) <= alpha else (middle + 1, high)
    return low if low <= n - lost else n + 1


@given(counts, st.sampled_from([0.0, 0.02, 0.1, 0.4]))
@settings(deadline=None, max_examples=40)
def test_p_value_is_monotone(case: tuple[int, int, int], margin: float) -> None:
    won, lost, n = case
    p_value = noninferiority_p(won, lost, n, margin)
    assert 0.0 <= p_value <= 1.0
    if won + lost < n:
        assert (
            noninferiority_p(won + 1, lost, n, margin)
            <= p_value + 1e-12
            <= noninferiority_p(won, lost + 1, n, margin) + 2e-12
        )


def test_min_sample_size_by_hand() -> None:
    """(1 - 0.05)^n <= 0.025 from n = 72 on: with fewer even a model that loses none may have lost 5 points."""
    assert min_sample_size(0.05, 0.025) == 72
    assert noninferiority_p(0, 0, 5, 0.05) > 0.7
    assert noninferiority_p(0, 0, 71, 0.05) > 0.025
    assert noninferiority_p(0, 0, 100, 0.05) < 0.025


def test_margin_of_one_by_hand() -> None:
    assert (noninferiority_p(0, 4, 5, 1.0), noninferiority_p(0, 5, 5, 1.0)) == (0.0, 1.0)


def test_impossible_counts_are_refused() -> None:
    for counted in ((3, 3, 5), (-1, 0, 5), (0, 0, 0)):
        with pytest.raises(DataError, match="not possible"):
            score_interval(*counted)
    with pytest.raises(DataError, match="margin"):
        noninferiority_p(0, 0, 5, 1.5)
    with pytest.raises(DataError, match="confidence"):
        score_interval(0, 0, 5, confidence=1.0)


@pytest.mark.parametrize(
    ("only_new", "only_old", "p"),
    # 2 (C(6,0) + C(6,1)) / 64 = 14/64; 2/2^5; nothing to tell apart; equal counts are capped at 1
    [(5, 1, 0.21875), (0, 5, 0.0625), (0, 0, 1.0), (3, 3, 1.0), (1500, 1500, 1.0)],
)
def test_mcnemar_by_hand(only_new: int, only_old: int, p: float) -> None:
    assert mcnemar_p(only_new, only_old) == mcnemar_p(only_old, only_new) == pytest.approx(p, rel=1e-12)


def test_paired_difference_by_hand() -> None:
    """40 problems, 20 right before; 8 more right now, none lost: +0.2, p = 2 / 2^8."""
    old = [1] * 20 + [0] * 20
    new = [1] * 28 + [0] * 12
    paired = paired_difference(new, old)
    assert paired.difference.mean == pytest.approx(0.2)
    assert paired.difference.low > 0.05
    assert paired.p_value == 2 / 2**8
    assert accuracy(old).high > accuracy(new).low


def test_unpaired_values_are_refused() -> None:
    with pytest.raises(DataError, match="neither 0 nor 1"):
        paired_difference([0.5], [1.0])
    with pytest.raises(DataError, match="2 values against 1"):
        paired_difference([1.0, 1.0], [1.0])


@pytest.mark.parametrize(
    ("case", "margin", "chance"),
    [  # the largest chance of an outcome as good, from a fine grid: 64 even steps of √ missed up to 5 % of it
        ((33, 28, 200), 0.05, 0.029868),
        ((16, 33, 300), 0.1, 0.038209),
        ((53, 45, 400), 0.03, 0.023486),
        ((56, 41, 250), 0.02, 0.022754),
    ],
)
def test_noninferiority_p_includes_narrow_peaks(case: tuple[int, int, int], margin: float, chance: float) -> None:
    assert noninferiority_p(*case, margin) == pytest.approx(chance, rel=1e-3)

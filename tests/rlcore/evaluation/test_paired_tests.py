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
    _score,
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
def test_tangos_intervals_are_those_that_others_publish(
    case: tuple[int, int, int], confidence: float, low: float, high: float
) -> None:
    assert score_interval(*case, confidence=confidence) == (pytest.approx(low, abs=5e-5), pytest.approx(high, abs=5e-5))


def test_the_unconditional_test_of_better_is_the_published_one() -> None:
    """floor(Cavo et al. 2012 / 10): 1 won, 0 lost of 14. contingencytables 3.0 prints the two-sided P = 0.542071, which
    has 0.0001 for the part of the chances that it leaves out. Its two sides are equal."""
    assert 2.0 * noninferiority_p(1, 0, 14, 0.0) == pytest.approx(0.542071 - 0.0001, abs=2e-6)


@pytest.mark.parametrize("n", [12, 40, 200])
@pytest.mark.parametrize("alpha", [0.025, 0.05 / 30])
def test_better_is_said_no_more_often_than_the_level_where_nothing_is(n: int, alpha: float) -> None:
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
def test_none_different_leaves_a_change_of_z2_over_n_plus_z2(n: int) -> None:
    """q = -Δ there, so T² = n Δ / (1 + Δ) = z² at Δ = -z² / (n + z²), z² = 3.8415: 0.434 for five problems."""
    low, high = score_interval(0, 0, n)
    assert (low, high) == (pytest.approx(-3.841459 / (n + 3.841459), abs=1e-6), -low)


def test_all_won_or_all_lost_has_an_interval_too() -> None:
    """The end beyond is the edge of what can be; where all are lost the interval is mirrored."""
    low, high = score_interval(5, 0, 5)
    assert (0.0 < low < 0.5, high) == (True, 1.0)
    assert score_interval(0, 5, 5) == (-high, -low)


@pytest.mark.parametrize("case", [(2, 9, 44), (1, 0, 30), (0, 3, 12), (30, 20, 100), (7, 7, 14)])
def test_the_ends_are_where_a_slow_score_statistic_is_rejected(case: tuple[int, int, int]) -> None:
    low, high = score_interval(*case, confidence=0.9)
    assert slow_score(*case, low) == pytest.approx(1.644854, abs=2e-3)
    assert slow_score(*case, high) == pytest.approx(-1.644854, abs=2e-3)


@given(counts)
@settings(deadline=None)
def test_an_interval_holds_its_estimate_and_grows_with_confidence(case: tuple[int, int, int]) -> None:
    narrow, wide = score_interval(*case, confidence=0.8), score_interval(*case, confidence=0.99)
    assert -1.0 <= wide[0] <= narrow[0] <= (case[0] - case[1]) / case[2] <= narrow[1] <= wide[1] <= 1.0


def test_of_two_problems_none_different_the_p_value_is_that_by_hand() -> None:
    """Margin ½, n = 2, T(0, 0): outcomes with T as high are (0, 0), (1, 0), (2, 0), (1, 1), that is all without a loss,
    and one won against one lost, which has change 0 too. P = (1 - q)² + 2 q (q - ½), largest at q = ½: ¼."""
    assert noninferiority_p(0, 0, 2, 0.5) == pytest.approx(0.25, abs=1e-6)


@pytest.mark.parametrize(
    "case", [(0, 0, 30, 0.1), (2, 3, 25, 0.1), (5, 4, 40, 0.05), (1, 0, 12, 0.3), (0, 2, 20, 0.05)]
)
def test_the_p_value_is_the_largest_chance_of_what_is_as_good_or_better(case: tuple[int, int, int, float]) -> None:
    won, lost, n, margin = case
    places = [(w, b) for w in range(n + 1) for b in range(n + 1 - w)]
    reached = slow_score(won, lost, n, -margin) - 1e-4
    better = np.array([place for place in places if slow_score(*place, n, -margin) >= reached])
    largest = max(
        chances(q, -margin, better[:, 0], better[:, 1], n).sum() for q in np.linspace(margin, (1 + margin) / 2, 400)
    )
    assert noninferiority_p(won, lost, n, margin) == pytest.approx(largest, rel=0.01)


@pytest.mark.parametrize("alpha", [0.025, 0.05 / 6, 0.05 / 30])
@pytest.mark.parametrize(("n", "margin"), [(5, 0.3), (12, 0.3), (30, 0.1), (80, 0.05), (80, 0.1)])
def test_a_loss_of_exactly_the_margin_passes_no_more_often_than_the_level(n: int, margin: float, alpha: float) -> None:
    """Every outcome is weighed by its chance, at discordances off the grid of the test itself."""
    won = np.repeat(np.arange(n + 1), n + 1)
    lost = np.tile(np.arange(n + 1), n + 1)
    passes = np.array([_fewest_won(b, n, margin, alpha) for b in range(n + 1)])
    is_passed = (won >= passes[lost]) & (won + lost <= n)
    levels = [
        float(chances(q, -margin, won[is_passed], lost[is_passed], n).sum())
        for q in np.linspace(margin, (1.0 + margin) / 2.0, 30)
    ]
    assert max(levels) <= 1.01 * alpha
    assert n < min_sample_size(margin, alpha) or max(levels) > 0.1 * alpha  # and it is not merely never passed


def _fewest_won(lost: int, n: int, margin: float, alpha: float) -> int:
    low, high = 0, n - lost + 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if noninferiority_p(middle, lost, n, margin) <= alpha else (middle + 1, high)
    return low if low <= n - lost else n + 1


@pytest.mark.parametrize(
    ("won", "lost", "n", "margin", "peak"),
    [
        (33, 28, 200, 0.05, 0.52152),
        (16, 33, 300, 0.1, 0.5476),
        (53, 45, 400, 0.03, 0.51048),
        (56, 41, 250, 0.02, 0.50739),
    ],
)
def test_no_narrow_peak_is_larger_than_the_p_value(won: int, lost: int, n: int, margin: float, peak: float) -> None:
    """Chances that a fine grid found: one of 64 even steps of √ missed up to 5 % of them."""
    first, second = (each.ravel() for each in np.meshgrid(np.arange(n + 1), np.arange(n + 1)))
    possible = first + second <= n
    first, second = first[possible], second[possible]
    as_good = _score(first, second, n, -margin) >= float(_score(won, lost, n, -margin)) - 1e-9
    largest = chances(peak, -margin, first[as_good], second[as_good], n).sum()
    assert largest <= noninferiority_p(won, lost, n, margin) * 1.001


@given(counts, st.sampled_from([0.0, 0.02, 0.1, 0.4]))
@settings(deadline=None, max_examples=40)
def test_more_lost_never_helps_and_more_won_never_hurts(case: tuple[int, int, int], margin: float) -> None:
    won, lost, n = case
    p_value = noninferiority_p(won, lost, n, margin)
    assert 0.0 <= p_value <= 1.0
    if won + lost < n:
        assert (
            noninferiority_p(won + 1, lost, n, margin)
            <= p_value + 1e-12
            <= noninferiority_p(won, lost + 1, n, margin) + 2e-12
        )


def test_five_problems_rule_out_nothing_and_none_lost_in_a_hundred_does() -> None:
    """(1 - 0.05)^n <= 0.025 from n = 72 on: with fewer even a model that loses none may have lost 5 points."""
    assert min_sample_size(0.05, 0.025) == 72
    assert noninferiority_p(0, 0, 5, 0.05) > 0.7
    assert noninferiority_p(0, 0, 71, 0.05) > 0.025
    assert noninferiority_p(0, 0, 100, 0.05) < 0.025


def test_a_margin_of_all_is_passed_unless_all_were_lost() -> None:
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
    [(5, 1, 0.21875), (0, 5, 0.0625), (0, 0, 1.0), (3, 3, 1.0)],
)
def test_mcnemar_by_hand(only_new: int, only_old: int, p: float) -> None:
    assert mcnemar_p(only_new, only_old) == mcnemar_p(only_old, only_new) == pytest.approx(p, rel=1e-12)


def test_mcnemar_at_a_size_beyond_floats() -> None:
    assert mcnemar_p(1500, 1500) == 1.0
    assert 0.0 < mcnemar_p(1600, 1400) < 0.001


def test_a_paired_difference_is_seen_where_two_separate_intervals_overlap() -> None:
    """40 problems, 20 right before; 8 more right now, none lost: +0.2, p = 2 / 2^8."""
    old = [1] * 20 + [0] * 20
    new = [1] * 28 + [0] * 12
    paired = paired_difference(new, old)
    assert paired.difference.mean == pytest.approx(0.2)
    assert paired.difference.low > 0.05
    assert paired.p_value == 2 / 2**8
    assert accuracy(old).high > accuracy(new).low


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=30))
def test_a_difference_turns_its_sign_with_its_sides(pairs: list[tuple[bool, bool]]) -> None:
    new, old = zip(*pairs, strict=True)
    there, back = paired_difference(new, old), paired_difference(old, new)
    assert there.p_value == back.p_value
    assert there.difference.mean == -back.difference.mean
    assert there.difference.low == pytest.approx(-back.difference.high)


def test_paired_intervals_cover_no_difference_as_often_as_they_say() -> None:
    """Two systems, each right 60 % of the time, agreeing on most problems."""
    generator = np.random.default_rng(1)
    covered = rejected = 0
    for _ in range(300):
        old = generator.random(120) < 0.6
        redrawn = generator.random(120) < 0.3
        new = np.where(redrawn, generator.random(120) < 0.6, old)
        paired = paired_difference(new, old)
        covered += paired.difference.low <= 0.0 <= paired.difference.high
        rejected += paired.p_value < 0.05
    assert covered / 300 > 0.9
    assert rejected / 300 < 0.08  # an exact test errs on the safe side


def test_what_is_no_verdict_or_has_no_partner_is_refused() -> None:
    with pytest.raises(DataError, match="neither 0 nor 1"):
        paired_difference([0.5], [1.0])
    with pytest.raises(DataError, match="2 values against 1"):
        paired_difference([1.0, 1.0], [1.0])

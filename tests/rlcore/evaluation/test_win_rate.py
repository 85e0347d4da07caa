"""Win rates with known answers, the audit of a judge, and its dependence on the reward model."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from rlcore.config import JudgeBounds
from rlcore.errors import DataError
from rlcore.evaluation.intervals import mean_fraction
from rlcore.evaluation.win_rate import Floats, PairResults, audit_judge, dependence, length_controlled, win_rate

NAN = float("nan")


def verdicts(forward: Floats, backward: Floats, gaps: Floats | None = None) -> PairResults:
    """Return verdicts of pairs whose answers differ in length by ``gaps``; by default lengths are equal."""
    longer = np.zeros(len(forward)) if gaps is None else gaps
    return PairResults(
        forward=forward, backward=backward, lengths=1000.0 + longer, other_lengths=np.full(len(forward), 1e3)
    )


def test_clear_winner() -> None:
    gaps = np.random.default_rng(0).normal(0.0, 50.0, 40)
    found = win_rate(verdicts(np.ones(40), np.ones(40), gaps), seed=0)
    assert (found.rate.mean, found.wins, found.ties, found.losses) == (1.0, 40, 0, 0)
    assert found.rate.low > 0.85
    assert found.length_controlled.low > 0.6
    assert (found.order_dependent.mean, found.first) == (0.0, 0.5)


def test_judge_that_prefers_first() -> None:
    found = win_rate(verdicts(np.ones(30), np.zeros(30)), seed=0)
    assert (found.rate.mean, found.order_dependent.mean, found.first) == (0.5, 1.0, 1.0)
    assert win_rate(verdicts(np.zeros(30), np.ones(30)), seed=0).first == 0.0


def test_rounding_is_no_order_dependence() -> None:
    grades = np.linspace(0.0, 1.0, 30)
    turned = 1.0 - (1.0 - grades)
    assert (turned != grades).any()
    assert win_rate(verdicts(grades, turned), seed=0).order_dependent.mean == 0.0


@pytest.mark.parametrize("seed", range(2))
def test_length_control_removes_preference_for_length(seed: int) -> None:
    gaps = np.random.default_rng(seed).normal(85.0, 100.0, 200)  # longer in four of five
    longer = (gaps > 0.0).astype(float)
    found = win_rate(verdicts(longer, longer, gaps), seed=0)
    assert found.rate.low > 0.7
    assert found.length_controlled.low < 0.5 < found.length_controlled.high
    # A judge with a sharp edge at 0 is not the smooth one of the regression: by chance 0.68 with the first seed.
    assert found.length_controlled.mean < 0.7 < found.rate.low


def test_length_control_without_equal_lengths_is_uncertain() -> None:
    gaps = np.random.default_rng(0).uniform(100.0, 200.0, 200)  # always longer
    found = length_controlled(np.ones(200), gaps, np.zeros(200))
    assert found.low < 0.5
    assert found.high - found.low > 0.5


def test_length_control_by_hand() -> None:
    """z is ±tanh(1). Of those with z > 0 three of four won, of the others one of four: θ = 0 by symmetry.

    With three of four won on both sides φ is 0, and σ(θ) = (6 + 1) / (8 + 2), the imagined prompts included.
    """
    gaps = np.array([1.0, -1.0] * 4)
    won = np.array([1.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 0.0])
    assert length_controlled(won, gaps, np.zeros(8)).mean == pytest.approx(0.5, abs=1e-9)
    alike = np.array([1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0])
    assert length_controlled(alike, gaps, np.zeros(8)).mean == pytest.approx(0.7, abs=1e-9)


def test_unjudged_pairs_are_left_out() -> None:
    forward, backward = np.array([1.0, NAN, 1.0, NAN]), np.array([1.0, 1.0, NAN, NAN])
    found = win_rate(verdicts(forward, backward), seed=0)
    assert (found.rate.mean, found.rate.n, found.losses) == (1.0, 1, 0)
    ties = win_rate(verdicts(np.full(30, 0.5), np.full(30, 0.5)), seed=0)
    assert (ties.rate.mean, ties.length_controlled.mean, ties.ties) == (0.5, 0.5, 30)
    with pytest.raises(DataError, match="no valid result for any of"):
        win_rate(verdicts(np.full(3, NAN), np.ones(3)), seed=0)


@pytest.mark.parametrize(("theta", "slope", "ties"), [(0.0, 2.0, 0.3), (1.5, 1.0, 0.5)])
def test_win_rate_intervals_cover_truth(theta: float, slope: float, ties: float) -> None:
    """300 draws of 60 prompts: 95 % holds 285 ± 3.8; at least 272 is 3.5 standard deviations below."""
    generator = np.random.default_rng(7)

    def draw(count: int) -> tuple[Floats, Floats]:
        gaps = generator.normal(100.0, 100.0, count)
        chance = 1.0 / (1.0 + np.exp(-theta - slope * np.tanh(gaps / 100.0)))
        won = (generator.random(count) < chance).astype(float)
        return np.where(generator.random(count) < ties, 0.5, won), gaps

    truth = float(draw(400_000)[0].mean())
    at_equal = (1.0 - ties) / (1.0 + np.exp(-theta)) + ties / 2.0
    raw = controlled = 0
    for number in range(300):
        values, gaps = draw(60)
        interval = mean_fraction(values, seed=number)
        raw += interval.low <= truth <= interval.high
        interval = length_controlled(values, gaps, np.zeros(60))
        controlled += interval.low <= at_equal <= interval.high
    assert raw >= 272
    assert controlled >= 272


def judged(forward: Floats, backward: Floats, gaps: Floats, **bounds: float) -> dict[str, bool]:
    """For each check of an audit, in words, whether it passed."""
    found = audit_judge(verdicts(forward, backward, gaps), np.arange(len(forward)), JudgeBounds(**bounds), seed=0)
    return {check.name: check.passed for check in found.checks}


def test_agreeing_judge_passes() -> None:
    gaps = np.tile([10.0, -10.0], 50)
    ones = np.ones(100)
    assert set(judged(ones, ones, gaps).values()) == {True}
    found = audit_judge(verdicts(ones, ones, gaps), np.arange(100), JudgeBounds(), seed=0)
    assert (found.agreement.mean, found.length_bias.mean, found.passed) == (1.0, 0.0, True)
    # People take the longer in half of the pairs, so the rule agrees in half of them and the judge in all.
    assert found.beyond_length.mean == pytest.approx(0.5)
    assert found.beyond_length.low > 0.3


def test_random_and_position_judges_fail() -> None:
    gaps = np.tile([10.0, -10.0], 50)
    chance = np.random.default_rng(0).integers(0, 2, 100).astype(float)
    assert not judged(chance, chance, gaps)["agreement with humans"]
    found = judged(np.ones(100), np.zeros(100), gaps)
    assert not found["fraction of results that depend on the order"]
    assert not found["agreement with humans"]


def test_length_bias_needs_different_lengths() -> None:
    ones, name = np.ones(100), "preference for the longer answer beyond that of humans"
    found = audit_judge(verdicts(ones, ones, ones * 0.0), np.arange(100), JudgeBounds(), seed=0)
    assert {check.name: check.passed for check in found.checks}[name] is False
    assert found.checks[-1].sentence.endswith("no human pair with a result has answers of different lengths")
    assert judged(ones, ones, ones * 0.0, max_length_bias=1.0)[name]  # nothing is asked


def test_length_judge_fails() -> None:
    """People take the longer in half of the pairs, the judge in all: 1 - ½. It agrees in half of them."""
    gaps = np.tile([10.0, -10.0], 50)
    longer = (gaps > 0.0).astype(float)
    found = audit_judge(verdicts(longer, longer, gaps), np.arange(100), JudgeBounds(), seed=0)
    assert found.length_bias.mean == pytest.approx(0.5)
    assert found.length_bias.low > 0.3
    assert found.agreement.mean == 0.5
    assert not found.checks[2].passed
    # Where people prefer the longer too, as much as the judge does, that is no bias.
    alike = audit_judge(verdicts(np.ones(50), np.ones(50), np.full(50, 9.0)), np.arange(50), JudgeBounds(), seed=0)
    assert alike.length_bias.mean == 0.0
    assert alike.passed
    for each in (found, alike):  # and it knows nothing but lengths
        assert (each.beyond_length.mean, each.beyond_length.high) == (0.0, 0.0)


def test_clusters_widen_agreement() -> None:
    values = np.repeat([1.0, 0.0, 1.0, 1.0], 25)
    pairs = verdicts(values, values)
    apart = audit_judge(pairs, np.arange(100), JudgeBounds(), seed=0)
    together = audit_judge(pairs, np.repeat(np.arange(4), 25), JudgeBounds(), seed=0)
    assert together.agreement.low < apart.agreement.low - 0.2
    assert not together.checks[0].passed


Bools = NDArray[np.bool_]


def excess(own: Floats, other: Floats) -> float:
    return dependence(verdicts(own, own), verdicts(other, other), np.arange(len(own)), seed=0).excess.mean


def test_dependence_by_hand() -> None:
    # Of 10 pairs the judge errs on 2 and the reward model on 4: independent errors disagree on .8 * .4 + .6 * .2 = .44.
    judge, both, apart = (np.ones(10) for _ in range(3))
    judge[:2], both[:4], apart[2:6] = 0.0, 0.0, 0.0
    assert excess(judge, both) == pytest.approx(1.0 - 0.2 / 0.44)  # they disagree on two pairs
    assert excess(judge, apart) == pytest.approx(1.0 - 0.6 / 0.44)  # and on six
    assert excess(judge, judge) == 1.0
    assert excess(np.ones(10), np.ones(10)) == 0.0  # no error is in common
    found = dependence(verdicts(judge, judge), verdicts(both, both), np.arange(10), seed=0)
    assert found.agreement.mean == 0.8
    with pytest.raises(DataError, match="no human pair has a result of both"):
        excess(np.full(3, NAN), np.ones(3))


def test_dependence_detects_twin_with_noisy_labels() -> None:
    # A quarter of the labels is wrong, for both models: each agrees with the truth on 0.85 of the pairs, and with the
    # labels on a = 0.675. They disagree on 2 * .85 * .15 = .255; independent errors would on 2 a (1 - a) = .439: 0.42.
    generator, limit, pairs = np.random.default_rng(0), JudgeBounds().max_dependence, (5, 500)
    label = generator.random(pairs) > 0.25
    right, other = (generator.random(pairs) < 0.85 for _ in range(2))
    twin = right ^ (generator.random(pairs) < 0.01)

    def above(model: Bools) -> int:
        both = zip((right == label).astype(float), (model == label).astype(float), strict=True)
        return sum(excess(*each) > limit for each in both)

    assert above(twin) == 5
    assert above(other) <= 1

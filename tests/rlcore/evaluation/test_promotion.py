"""The promotion gate: values by hand, and what no data may make it do."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.errors import DataError, NonFiniteError
from rlcore.evaluation.paired_tests import noninferiority_p
from rlcore.evaluation.promotion import (
    PairedMetric,
    PromotionDecision,
    PromotionRule,
    alpha_of_look,
    bootstrap_means,
    check_max,
    check_min,
    decide,
    sign_flip_p,
    superiority_p,
)

RULE = PromotionRule(alpha=0.05, min_gain=0.0)
verdicts = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), min_size=1, max_size=80)


def answers(name: str, champion: list[float], challenger: list[float], **more: float | bool) -> PairedMetric:
    return PairedMetric(name=name, champion=np.array(champion, float), challenger=np.array(challenger, float), **more)  # type: ignore[arg-type]


def verdict(
    primary: PairedMetric, *guards: PairedMetric, rule: PromotionRule = RULE, look: int = 1
) -> PromotionDecision:
    return decide(primary, guards, (), rule=rule, look=look, seed=0)


def test_levels_of_looks_sum_to_alpha() -> None:
    """0.05 / (1·2) = 0.025, 0.05 / (2·3) = 0.00833; the first T add up to alpha · T / (T + 1)."""
    assert alpha_of_look(0.05, 1) == 0.025
    assert alpha_of_look(0.05, 2) == pytest.approx(0.05 / 6)
    assert sum(alpha_of_look(0.05, look) for look in range(1, 100)) == pytest.approx(0.05 * 99 / 100)
    with pytest.raises(DataError, match="count from 1"):
        alpha_of_look(0.05, 0)


def test_seven_wins_pass_two_looks() -> None:
    """The conditional test would say P(7 heads of 7) = 1/128 = 0.0078, the unconditional one 0.0059, weighed here over
    every outcome with McNemar's statistic at √7 or more. Levels: 0.025, 0.0083, 0.0042. Gain 7 of 20 = 0.35."""
    pair = answers("accuracy", [0] * 7 + [1] * 13, [1] * 20)
    first = verdict(pair)
    (check,) = first.checks
    outcomes = [(w, b) for w in range(21) for b in range(21 - w) if w > b and (w - b) ** 2 >= 7 * (w + b)]
    ways = [(math.comb(20, w) * math.comb(20 - w, b), w + b) for w, b in outcomes]
    largest = max(sum(way * q**k * (1 - 2 * q) ** (20 - k) for way, k in ways) for q in np.linspace(0.001, 0.5, 2000))
    assert (first.promote, check.p_value, check.estimate) == (True, pytest.approx(largest, rel=1e-5), 0.35)
    assert check.low < 0.35 < check.high
    assert verdict(pair, look=2).promote
    assert not verdict(pair, look=3).promote
    assert superiority_p(answers("accuracy", [1] * 20, [0] * 7 + [1] * 13), seed=0) == 1.0  # the loser is not "certain"


def test_small_gain_is_refused() -> None:
    """12 wins to 0 of 1,000: p = 1/4096, gain 0.012."""
    pair = answers("accuracy", [0] * 12 + [1] * 988, [1] * 1000)
    assert verdict(pair, rule=PromotionRule(min_gain=0.012)).promote
    refused = verdict(pair, rule=PromotionRule(min_gain=0.02))
    assert not refused.promote
    assert "better, but by less than 0.02" in refused.sentence


def test_broken_guard_refuses_and_is_named() -> None:
    primary = answers("accuracy", [0] * 100 + [1] * 100, [1] * 200)
    longer = answers("length", [10.0] * 200, [10.0, 30.0] * 100, margin=5.0, higher_is_better=False)
    shorter = answers("length", [10.0] * 200, [8.0, 12.0] * 100, margin=5.0, higher_is_better=False)
    assert verdict(primary, shorter).promote
    refused = verdict(primary, longer)
    assert not refused.promote
    assert refused.sentence.startswith("Refused: length changes by +10")
    assert [check.passed for check in refused.checks] == [True, False]
    assert refused.checks[1].low <= 10.0 <= refused.checks[1].high
    assert refused.checks[1].limit == 5.0


def test_guard_needs_enough_problems() -> None:
    """(1 - 0.05)^72 = 0.0249: with fewer problems none lost is what a loss of 5 points often looks like."""
    primary = answers("accuracy", [0] * 20, [1] * 20)
    refused = verdict(primary, answers("safety", [1] * 20, [1] * 20, margin=0.05))
    assert not refused.promote
    assert "n = 20; not enough problems: at least 72 are needed" in refused.sentence
    assert verdict(primary, answers("safety", [1] * 600, [1] * 600, margin=0.05)).promote


def test_sign_flips_by_hand() -> None:
    """Differences 1, 2, 3: of the 8 sign patterns only +++ reaches 6, so p = 1/8 but for the sampling of the flips."""
    p_value = sign_flip_p(np.array([1.0, 2.0, 3.0]), seed=0, flips=20_000)
    assert p_value == pytest.approx(1 / 8, abs=4 * math.sqrt(1 / 8 * 7 / 8 / 20_000))
    assert sign_flip_p(np.zeros(4), seed=0, flips=100) == 1.0
    gained = answers("reward", [0.1] * 30, [0.1 + 0.01 * i for i in range(1, 31)])
    assert verdict(gained).promote
    assert not verdict(answers("reward", [0.5] * 30, [0.5, 0.4] * 15)).promote


def test_bootstrap_means_by_hand() -> None:
    """Two differences of 1 and 0, and ±1: mean 1/4, variance 3/4 - 1/16 = 11/16; of the mean of 4: 11/64."""
    means = bootstrap_means(np.array([1.0, 0.0]), seed=0, resamples=40_000)
    assert means.mean() == pytest.approx(1 / 4, abs=0.01)
    assert means.var() == pytest.approx(11 / 64, rel=0.03)


def test_first_champion_needs_only_limits() -> None:
    """The lower end of Clopper and Pearson's interval of 8 in 10 is 0.444."""
    held = (check_min("accuracy", [1] * 8 + [0] * 2, 0.44), check_max("KL", 0.2, 0.2))
    assert decide(None, (), held, rule=RULE, look=1, seed=0).promote
    refused = decide(None, (), (*held, check_min("accuracy", [1] * 8 + [0] * 2, 0.5)), rule=RULE, look=1, seed=0)
    assert refused.sentence == "Refused: accuracy is at least 0.444, which does not reach 0.5."
    assert not check_max("KL", 0.21, 0.2).passed


def test_incomparable_values_are_refused() -> None:
    good = answers("accuracy", [0, 1], [1, 1])
    for bad in (answers("a", [0, 1], [1]), answers("a", [], [])):
        with pytest.raises(DataError, match="same problems"):
            verdict(bad)
    with pytest.raises(NonFiniteError, match="1 values are not finite"):
        verdict(good, answers("reward", [0.0, 1.0], [math.nan, 1.0]))
    with pytest.raises(DataError, match="need a champion"):
        decide(None, (good,), (), rule=RULE, look=1, seed=0)
    with pytest.raises(DataError, match="alpha"):
        PromotionRule(alpha=0.0)


@given(verdicts, st.integers(1, 5))
@settings(deadline=None)
def test_at_most_one_of_two_models_is_promoted(pairs: list[tuple[int, int]], look: int) -> None:
    first, second = [float(a) for a, _ in pairs], [float(b) for _, b in pairs]
    there = verdict(answers("accuracy", first, second), look=look)
    back = verdict(answers("accuracy", second, first), look=look)
    assert not (there.promote and back.promote)
    assert there.checks[0].estimate == -back.checks[0].estimate


@given(verdicts, st.integers(1, 5))
@settings(deadline=None)
def test_looks_guards_and_min_gain_never_help(pairs: list[tuple[int, int]], look: int) -> None:
    primary = answers("accuracy", [float(a) for a, _ in pairs], [float(b) for _, b in pairs])
    guard = answers("length", [float(a) for a, _ in pairs], [float(b) for _, b in pairs], margin=0.1)
    harder = (
        verdict(primary, look=look + 1),
        verdict(primary, guard, look=look),
        verdict(primary, look=look, rule=PromotionRule(min_gain=0.2)),
    )
    assert verdict(primary, look=look).promote or not any(each.promote for each in harder)


@pytest.mark.parametrize("lost", [0, 1, 2, 3, 4])
def test_guard_passes_iff_noninferiority_p_reaches_level(lost: int) -> None:
    """72 problems, margin 0.1, level 0.025 at the first look; the paired tests enumerate the p-value."""
    guard = answers("slice", [1] * 72, [0] * lost + [1] * (72 - lost), margin=0.1)
    decision = verdict(answers("accuracy", [0] * 100, [1] * 100), guard)
    p_value = noninferiority_p(0, lost, 72, 0.1)
    assert decision.checks[1].p_value == pytest.approx(p_value)
    assert decision.promote == (p_value <= 0.025)

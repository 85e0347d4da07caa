from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_contracts.drift import (
    ColumnDrift,
    DriftLimits,
    judge,
    ks,
    ks_by_chance,
    not_compared,
    psi,
    psi_by_chance,
    worst_level,
)
from data_contracts.sketches import sketch

LENGTHS = st.lists(st.integers(0, 20_000), min_size=1, max_size=60)
SLOW = settings(deadline=None, max_examples=50)
NAMES = st.lists(st.sampled_from("abcdef"), min_size=1, max_size=60)


def made(lengths: list[int], names: list[str]) -> dict[str, object]:
    size = min(len(lengths), len(names))
    return dict(sketch(pd.DataFrame({"prompt_tokens": lengths[:size], "source": names[:size]})))


def column(before: dict[str, object], after: dict[str, object], name: str) -> ColumnDrift:
    return next(one for one in judge(before, after) if one.column == name)  # type: ignore[arg-type]  # sketches


@SLOW
@given(LENGTHS, NAMES)
def test_a_dataset_has_not_moved_from_itself(lengths: list[int], names: list[str]) -> None:
    one = made(lengths, names)
    for found in judge(one, one):  # type: ignore[arg-type]  # sketches
        assert (found.psi, found.ks, found.level, found.moves) == (0.0, 0.0, "calm", ())


@SLOW
@given(LENGTHS, LENGTHS, NAMES, NAMES)
def test_distances_are_symmetric_and_never_negative(a: list[int], b: list[int], c: list[str], d: list[str]) -> None:
    one, two = made(a, c), made(b, d)
    for name in ("prompt_tokens", "source"):
        there, back = column(one, two, name), column(two, one, name)
        assert there.psi == pytest.approx(back.psi)
        assert there.psi >= 0.0
        assert 0.0 <= there.ks <= 1.0 + 1e-12
        assert there.level == back.level


@given(st.lists(st.integers(0, 50), min_size=2, max_size=8).filter(any), st.integers(2, 9))
def test_the_same_shares_in_a_larger_dataset_are_no_drift(counts: list[int], times: int) -> None:
    filled = np.array(counts, dtype=np.float64) + 1.0
    assert psi(filled, times * filled) == pytest.approx(0.0, abs=1e-12)
    assert ks(filled, times * filled) == pytest.approx(0.0, abs=1e-12)


def test_distances_are_those_of_the_formula() -> None:
    before, after = np.array([50.0, 30.0, 20.0]), np.array([40.0, 40.0, 20.0])
    # PSI = (.5 - .4) ln(.5 / .4) + (.3 - .4) ln(.3 / .4) + 0 = .1 · .2231436 + .1 · .2876821 = .0510826
    assert psi(before, after) == pytest.approx(0.0510826, abs=1e-7)
    # Cumulative: .5, .8, 1 against .4, .8, 1.
    assert ks(before, after) == pytest.approx(0.1)
    # An empty bin counts as half a row of 10: (.05 - 1) ln(.05 / 1) twice = 1.9 · 2.9957323
    assert psi(np.array([0.0, 10.0]), np.array([10.0, 0.0])) == pytest.approx(5.6918913, abs=1e-6)


def test_what_chance_alone_gives_is_that_of_the_tables() -> None:
    # Tables of χ²: 10 degrees of freedom 29.588, 3 degrees 16.266, at 0.001. (1/100 + 1/400) = 0.0125.
    assert psi_by_chance(11, 100, 400, 0.001) == pytest.approx(0.0125 * 29.588, rel=0.01)
    assert psi_by_chance(4, 100, 400, 0.001) == pytest.approx(0.0125 * 16.266, rel=0.02)
    assert psi_by_chance(1, 100, 400, 0.001) == 0.0
    # Tables of Kolmogorov and Smirnov: 1.36 √((n + m) / (n m)) at 0.05.
    assert ks_by_chance(100, 400, 0.05) == pytest.approx(1.358 * math.sqrt(500 / 40_000), rel=1e-3)
    assert (psi_by_chance(3, 0, 5, 0.001), ks_by_chance(5, 0, 0.001)) == (math.inf, math.inf)


def test_two_samples_of_one_population_are_calm_at_every_size() -> None:
    generator = np.random.default_rng(0)
    levels = []
    for size in (30, 100, 1_000):
        for _ in range(100):
            sides = []
            for _ in range(2):
                lengths = generator.geometric(0.05, size).tolist()
                sides.append(made(lengths, generator.choice(list("aaabbc"), size).tolist()))
            levels += [one.level for one in judge(sides[0], sides[1])]  # type: ignore[arg-type]  # sketches
    assert len(levels) == 600
    assert sum(level != "calm" for level in levels) <= 3  # 0.6 are expected


def test_what_moved_is_named_with_its_shares() -> None:
    before = made([10] * 90 + [100] * 10, ["web"] * 80 + ["book"] * 20)
    after = made([10] * 40 + [100] * 60, ["web"] * 20 + ["book"] * 20 + ["chat"] * 60)
    lengths, sources = column(before, after, "prompt_tokens"), column(before, after, "source")
    assert (lengths.level, sources.level) == ("refuse", "refuse")
    assert lengths.means == (19.0, 64.0)
    assert {(move.name, move.before, move.after) for move in lengths.moves} == {
        ("8 to 12", 0.9, 0.4),
        ("96 to 128", 0.1, 0.6),
    }
    assert [(move.name, move.before, move.after) for move in sources.moves] == [("chat", 0.0, 0.6), ("web", 0.8, 0.2)]
    assert sources.means is None


def test_a_small_shift_warns_and_thresholds_are_data() -> None:
    before, after = (
        made([10] * size, ["a"] * share + ["b"] * (size - share)) for size, share in ((1000, 500), (1000, 350))
    )
    # PSI = .15 ln(.5 / .35) + .15 ln(.65 / .5) = .15 · .3566749 + .15 · .2623643 = .0928559
    assert column(before, after, "source").psi == pytest.approx(0.0928559, abs=1e-6)
    levels = {
        warn: worst_level(judge(before, after, DriftLimits(warn_psi=warn, refuse_psi=refuse)))  # type: ignore[arg-type]
        for warn, refuse in ((0.1, 0.25), (0.09, 0.25), (0.05, 0.09))
    }
    assert levels == {0.1: "calm", 0.09: "warn", 0.05: "refuse"}


def test_the_worst_column_comes_first_and_columns_of_other_sketches_are_named() -> None:
    before = sketch(pd.DataFrame({"task": ["a"] * 50, "prompt_tokens": [5] * 50}))
    after = sketch(pd.DataFrame({"task": ["b"] * 50, "prompt_tokens": [5] * 50, "source": ["x"] * 50}))
    assert [one.column for one in judge(before, after)] == ["task", "prompt_tokens"]
    assert not_compared(before, after) == ("source",)
    other = {**before, "prompt_tokens": {**before["prompt_tokens"], "edges": [1, 2]}}
    assert not_compared(before, other) == ("prompt_tokens",)
    assert worst_level(()) == "calm"

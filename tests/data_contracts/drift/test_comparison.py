from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.data_contracts.drift.comparison import (
    ColumnDrift,
    DriftLimits,
    by_chance,
    compare_columns,
    ks,
    not_compared,
    num_buckets,
    psi,
    worst_level,
)
from rlcore.data_contracts.drift.sketches import MAX_CATEGORIES, bucket_of, sketch

LENGTHS = st.lists(st.integers(0, 20_000), min_size=1, max_size=60)
SLOW = settings(deadline=None, max_examples=50)
NAMES = st.lists(st.sampled_from("abcdef"), min_size=1, max_size=60)


def made(lengths: list[int], names: list[str]) -> dict[str, object]:
    size = min(len(lengths), len(names))
    return dict(sketch(pd.DataFrame({"prompt_tokens": lengths[:size], "source": names[:size]})))


def column(before: dict[str, object], after: dict[str, object], name: str) -> ColumnDrift:
    return next(one for one in compare_columns(before, after) if one.column == name)  # type: ignore[arg-type]  # sketches


@SLOW
@given(LENGTHS, NAMES)
def test_a_dataset_has_not_moved_from_itself(lengths: list[int], names: list[str]) -> None:
    one = made(lengths, names)
    for found in compare_columns(one, one):  # type: ignore[arg-type]  # sketches
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
    # A bin that is empty on both sides does not count.
    assert psi(np.array([0.0, 50.0, 50.0]), np.array([0.0, 5.0, 5.0])) == 0.0


def test_what_chance_alone_gives_is_that_of_the_tables() -> None:
    # Tables of χ²: 10 degrees of freedom 18.307, 3 degrees 7.815, at 0.05; means 10 and 3. (1/1000 + 1/4000) = 0.00125.
    for bins, quantile in ((11, 18.307), (4, 7.815)):
        found = by_chance(np.full(bins, 1000 / bins), np.full(bins, 4000 / bins), 0.05)
        assert found.mean_psi == pytest.approx(0.00125 * (bins - 1), rel=0.5)  # of 39 deals
        assert found.psi == pytest.approx(0.00125 * quantile, rel=0.6)
    # At 0.001, 29.588 and 16.266, of 1,999 deals: the second largest.
    for bins, quantile in ((11, 29.588), (4, 16.266)):
        found = by_chance(np.full(bins, 1000 / bins), np.full(bins, 4000 / bins), 0.001)
        assert found.mean_psi == pytest.approx(0.00125 * (bins - 1), rel=0.1)
        assert found.psi == pytest.approx(0.00125 * quantile, rel=0.3)
    # Tables of Kolmogorov and Smirnov: 1.95 √((n + m) / (n m)) at 0.001, where bins are many.
    found = by_chance(np.full(200, 5.0), np.full(200, 20.0), 0.001)
    assert found.ks == pytest.approx(1.95 * math.sqrt(0.00125), rel=0.15)
    assert by_chance(np.zeros(3), np.ones(3), 0.001).psi == by_chance(np.ones(3), np.zeros(3), 0.001).ks == math.inf


def test_all_deals_of_two_values_are_counted_as_often_as_they_come() -> None:
    """Two names of two rows each, dealt two and two: of the six ways two are pure, PSI (¼ - 1) ln(¼) · 2 = 2.0794."""
    found = by_chance(np.array([1.0, 1.0]), np.array([1.0, 1.0]), 0.001)
    assert found.mean_psi == pytest.approx(2.0794 / 3, rel=0.1)
    assert found.psi == pytest.approx(2.0794, abs=1e-4)


def test_small_fractions_of_counts_are_dealt_by_their_sum() -> None:
    """Ten bins of 0.4: four values in all, as many as in four bins of 1."""
    found = by_chance(np.full(10, 0.4), np.full(10, 40.0), 0.05)
    assert math.isfinite(found.psi)
    assert found.mean_psi > 0.1


def names_of(chances: np.ndarray, rows: int, generator: np.random.Generator) -> dict[str, object]:
    places = generator.choice(len(chances), rows, p=chances / chances.sum())
    return dict(sketch(pd.DataFrame({"source": [f"name {place}" for place in places]})))


@pytest.mark.parametrize("rows", [(200, 200), (3_000, 150)])
@pytest.mark.parametrize("names", [2, MAX_CATEGORIES + 1, 3_000])
@pytest.mark.parametrize("kind", ["equal", "zipf"])
def test_names_of_one_population_are_calm_and_chance_is_exceeded_as_often_as_it_says(
    names: int, rows: tuple[int, int], kind: str
) -> None:
    """At a chance of 0.05, 60 tries: more than 8 come once in 300 times (3 expected); at the default none moves."""
    chances = np.ones(names) if kind == "equal" else 1.0 / np.arange(1, names + 1)
    generator, beyond = np.random.default_rng(0), 0
    for number in range(60):
        before, after = (names_of(chances, size, generator) for size in rows)
        (found,) = compare_columns(before, after, DriftLimits(chance=0.05))  # type: ignore[arg-type]  # sketches
        beyond += found.psi > found.psi_by_chance
        if number < 4:
            assert column(before, after, "source").level == "calm"
    assert beyond <= 8


@pytest.mark.parametrize(("names", "rows"), [(50, 2_000), (60, 2_000), (3_000, 2_000), (3_000, 20_000)])
def test_a_new_name_that_takes_three_tenths_is_refused_and_stands_first_however_many_there_are(
    names: int, rows: int
) -> None:
    generator = np.random.default_rng(1)
    chances = 1.0 / np.arange(1, names + 1)
    before = names_of(chances, rows, generator)
    after = names_of(np.append(chances * 0.7 / chances.sum(), 0.3), rows, generator)
    found = column(before, after, "source")
    assert found.level == "refuse"
    assert found.moves[0].name == f"name {names}"
    assert found.moves[0].before <= 2 / rows  # what the bucket may hide
    assert found.moves[0].after == pytest.approx(0.3, abs=0.03)


def test_a_name_that_was_cut_has_the_share_of_the_smallest_change_that_fits() -> None:
    frequent = [f"n{place:02}" for place in range(MAX_CATEGORIES)] * 3
    bucket = bucket_of("rare")
    assert all(bucket_of(name) != bucket for name in frequent)
    before = sketch(pd.DataFrame({"source": [*frequent, "rare", "rare"]}))  # 2 of 152, cut
    after = sketch(pd.DataFrame({"source": [*frequent, *["rare"] * 50]}))  # 50 of 200, kept
    (move, *_) = column(before, after, "source").moves
    assert (move.name, move.before, move.after) == ("rare", 2 / 152, 50 / 200)
    (move, *_) = column(after, before, "source").moves
    assert (move.name, move.before, move.after) == ("rare", 50 / 200, 2 / 152)


def test_names_are_compared_in_as_many_buckets_as_the_rows_bear() -> None:
    """h = n m / (n + m), h² / 2,000 buckets: 1,000 and 1,000 rows 125, 64 as a power of two."""
    sizes = {(100, 100): 16, (1_000, 1_000): 64, (2_000, 2_000): 256, (20_000, 20_000): 1_024, (10**6, 50): 16}
    assert {rows: num_buckets(*rows) for rows in sizes} == sizes


def test_names_that_an_old_report_lost_are_not_compared() -> None:
    sides = [sketch(pd.DataFrame({"source": [f"n{place}" for place in range(count)]})) for count in (60, 40)]
    old = {"source": {key: value for key, value in sides[0]["source"].items() if key != "buckets"}}
    assert not_compared(sides[0], sides[1]) == ()
    assert not_compared(old, old) == not_compared(old, sides[1]) == ("source",)
    assert compare_columns(old, sides[1]) == ()


def test_two_samples_of_one_population_are_calm_at_every_size() -> None:
    generator = np.random.default_rng(0)
    levels = []
    for size in (30, 100, 1_000):
        for _ in range(100):
            sides = []
            for _ in range(2):
                lengths = generator.geometric(0.05, size).tolist()
                sides.append(made(lengths, generator.choice(list("aaabbc"), size).tolist()))
            levels += [one.level for one in compare_columns(sides[0], sides[1])]  # type: ignore[arg-type]  # sketches
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
    # PSI = .15 ln(.5 / .35) + .15 ln(.65 / .5) = .15 · .3566749 + .15 · .2623643 = .0928559, by chance 2 / 1000
    assert column(before, after, "source").psi == pytest.approx(0.0928559 - 0.002, abs=3e-4)
    levels = {
        warn: worst_level(compare_columns(before, after, DriftLimits(warn_psi=warn, refuse_psi=refuse)))  # type: ignore[arg-type]
        for warn, refuse in ((0.1, 0.25), (0.09, 0.25), (0.05, 0.09))
    }
    assert levels == {0.1: "calm", 0.09: "warn", 0.05: "refuse"}


def test_the_worst_column_comes_first_and_columns_of_other_sketches_are_named() -> None:
    before = sketch(pd.DataFrame({"task": ["a"] * 50, "prompt_tokens": [5] * 50}))
    after = sketch(pd.DataFrame({"task": ["b"] * 50, "prompt_tokens": [5] * 50, "source": ["x"] * 50}))
    assert [one.column for one in compare_columns(before, after)] == ["task", "prompt_tokens"]
    assert not_compared(before, after) == ("source",)
    other = {**before, "prompt_tokens": {**before["prompt_tokens"], "edges": [1, 2]}}
    assert not_compared(before, other) == ("prompt_tokens",)
    assert worst_level(()) == "calm"

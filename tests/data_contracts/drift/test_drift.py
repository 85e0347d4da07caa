"""Sketches of datasets, rows in documents, and their comparison."""

from __future__ import annotations

import math
import zlib

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
from rlcore.data_contracts.drift.sketches import (
    MAX_CATEGORIES,
    NUM_BUCKETS,
    Sketch,
    bucket_of,
    design_effect,
    group_effect,
    script_of,
    sketch,
    word_of,
)


def ask(text: str, system: str = "") -> list[dict[str, str]]:
    turns = [{"role": "user", "content": text}]
    return [{"role": "system", "content": system}, *turns] if system else turns


def test_token_counts_fall_into_two_bins_per_doubling() -> None:
    made = sketch(pd.DataFrame({"prompt_tokens": [0, 1, 2, 3, 4, 5, 6, 9000]}))["prompt_tokens"]
    # Upper edges 1, 2, 3, 4, 6, 8, …: {0, 1}, {2}, {3}, {4}, {5, 6}, …, and one beyond 8192.
    assert made["counts"] == [2, 1, 1, 1, 2, *[0] * 21, 1]
    assert (made["max"], made["mean"]) == (9000.0, 9021 / 8)


@pytest.mark.parametrize(
    ("text", "script"),
    [
        ("Hello, мир", "latin"),
        ("Привет, world и мир", "cyrillic"),
        ("你好吗", "cjk"),
        ("3+4", "(no letters)"),
        ("", "(no letters)"),
    ],
)
def test_a_text_has_the_script_of_most_of_its_letters(text: str, script: str) -> None:
    assert script_of(text) == script


def test_the_word_of_a_text_is_the_one_with_the_smallest_checksum_in_any_order_and_case() -> None:
    words = ["solve", "the", "equation"]
    smallest = min(words, key=lambda word: zlib.crc32(word.encode()))
    assert word_of("Solve the EQUATION") == word_of("equation, the; solve solve!") == smallest
    assert word_of("?!") == "(no words)"


def test_a_prompt_counts_once_however_many_pairs_it_has() -> None:
    frame = pd.DataFrame(
        {
            "messages": [ask("one two", "be brief"), ask("one two", "be brief"), ask("drei")],
            "prompt_hash": ["x", "x", "y"],
            "prompt_tokens": [4, 4, 2],
            "chosen_tokens": [5, 1, 3],
            "rejected_tokens": [1, 5, 3],
            "margin": [0.0, 0.5, 9.0],
            "probability": [1.0, 0.6, 0.9],
            "source": ["a", "a", "b"],
        }
    )
    made = sketch(frame)
    assert sum(made["prompt_tokens"]["counts"]) == 2
    assert made["turns"]["counts"] == {"1": 1, "2": 1}
    assert made["script"]["counts"] == {"latin": 2}
    # 15 characters, the system turn's among them, in 4 tokens: 3.75; 4 in 2: 2.0.
    assert made["characters_per_token"]["mean"] == pytest.approx((3.75 + 2.0) / 2)
    # The two pairs of the first prompt have half of its weight each.
    assert made["chosen_is"]["counts"] == {"as long": 1, "longer": 0.5, "shorter": 0.5}
    assert made["chosen_tokens"]["counts"][:4] == [0.5, 0, 1, 0]
    assert made["chosen_tokens"]["mean"] == pytest.approx((5 / 2 + 1 / 2 + 3) / 2)
    assert made["margin"]["counts"] == [0.5, 0.5, 0, 0, 0, 0, 1]
    assert made["source"]["counts"] == {"a": 1, "b": 1}


def test_names_beyond_the_most_frequent_are_counted_together() -> None:
    names = [f"n{place:03}" for place in range(MAX_CATEGORIES + 5)] + ["n003"]
    made = sketch(pd.DataFrame({"task": names}))["task"]
    assert next(iter(made["counts"].items())) == ("n003", 2)
    assert (len(made["counts"]), made["others"]) == (MAX_CATEGORIES, 5)
    assert (len(made["buckets"]), sum(made["buckets"])) == (NUM_BUCKETS, len(names))
    assert made["buckets"][bucket_of("n003")] >= 2
    assert "buckets" not in sketch(pd.DataFrame({"task": names[:MAX_CATEGORIES]}))["task"]


def test_the_length_of_references_is_kept() -> None:
    made = sketch(pd.DataFrame({"reference": ["7", "12", "12"]}))["reference_characters"]
    assert made["counts"][:3] == [1, 2, 0]


def effect(places: np.ndarray) -> float:
    return design_effect(places, np.ones(len(places)))


@pytest.mark.parametrize("bins", [2, 3_000])
@pytest.mark.parametrize("rows", [40, 20_000])
def test_values_drawn_one_by_one_have_none(bins: int, rows: int) -> None:
    generator = np.random.default_rng(0)
    assert [effect(generator.integers(0, bins, rows)) for _ in range(10)] == [1.0] * 10


@pytest.mark.parametrize("size", [5, 20, 40])
def test_documents_of_equal_values_have_their_number_of_rows_and_half_as_many(size: int) -> None:
    documents = np.random.default_rng(1).integers(0, 10, 400)
    assert effect(np.repeat(documents, size)) == pytest.approx(1.0 + 1.5 * (size - 1.0), rel=0.2)


def test_rows_in_order_or_one_source_after_another_are_no_documents() -> None:
    generator = np.random.default_rng(2)
    places = generator.integers(0, 10, 2_000)
    assert effect(np.sort(places)) == effect(-np.sort(-places) + 9) == 1.0
    assert effect(np.concatenate([places[:1_000], places[1_000:] + 5])) == 1.0  # two sources
    nearly = np.argsort(np.arange(2_000) + generator.normal(0.0, 400.0, 2_000))
    assert effect(np.sort(places)[nearly]) < 5.0  # sorted by what goes with the column
    assert effect(np.repeat([0, 1, 0], 700)) == effect(np.zeros(0, dtype=np.int64)) == 1.0  # three stretches, no rows


def test_it_has_a_bound() -> None:
    assert effect(np.repeat(np.random.default_rng(3).integers(0, 10, 60), 900)) == 64.0


def drawn(
    generator: np.random.Generator, documents: int, size: int, *, longer: float = 1.0, group: str = ""
) -> dict[str, Sketch]:
    """Questions on pages: a page has its length and its words. With ``group``, a column of pages, rows are shuffled."""
    pages = np.repeat(np.arange(documents), size)
    tokens = longer * np.exp(generator.normal(5.0, 0.8, documents)[pages] + generator.normal(0.0, 0.1, len(pages)))
    words = generator.integers(0, 400, (documents, 3))[pages, generator.integers(0, 3, len(pages))]
    frame = pd.DataFrame({"prompt_tokens": tokens.round(), "task": [f"word {word}" for word in words]})
    if group:
        frame = frame.assign(**{group: pages}).iloc[generator.permutation(len(frame))]
    return sketch(frame)


def moved(before: dict[str, Sketch], after: dict[str, Sketch], limits: DriftLimits | None = None) -> list[ColumnDrift]:
    return [column for column in compare_columns(before, after, limits) if column.level != "calm"]


@pytest.mark.parametrize(("documents", "size"), [(40, 50), (400, 5)])
def test_pages_of_one_kind_are_calm(documents: int, size: int) -> None:
    """Counted row by row, 25 of 25 are refused."""
    generator = np.random.default_rng(4)
    pairs = [(drawn(generator, documents, size), drawn(generator, documents, size)) for _ in range(25)]
    assert [moved(*pair) for pair in pairs] == [[]] * 25
    beyond = sum(
        column.psi > column.psi_by_chance
        for pair in pairs
        for column in compare_columns(*pair, DriftLimits(chance=0.05))
    )
    assert beyond <= 8  # of 50; 2.5 are expected, more than 8 once in 1,000


@pytest.mark.parametrize(("documents", "size"), [(60, 20), (200, 10)])
def test_longer_pages_are_refused(documents: int, size: int) -> None:
    generator = np.random.default_rng(5)
    for _ in range(5):
        found = moved(drawn(generator, documents, size), drawn(generator, documents, size, longer=3.0))
        assert [(column.column, column.level) for column in found] == [("prompt_tokens", "refuse")]


def test_the_effect_of_named_groups_by_hand() -> None:
    # 4 groups of 3 rows, each in one of 2 bins: p = 1/2, sizes 3. Each group differs from p by 1.5: V = 4 * 2.25 * 4/3
    # / 12 = 1 for both bins and below the first; independent values: 1/4. The effect is 4, and 1 + 1.3 * 3 of names.
    groups, places = np.repeat(np.arange(4), 3), np.repeat([0, 0, 1, 1], 3)
    order = np.random.default_rng(0).permutation(12)
    for rows in (np.arange(12), order):
        effects = [
            group_effect(places[rows], np.ones(12), groups[rows], is_ordered=is_ordered) for is_ordered in (True, False)
        ]
        assert effects == pytest.approx([4.9, 4.9])
    assert group_effect(places, np.ones(12), np.zeros(12, dtype=int), is_ordered=True) == 12.0  # one document
    assert group_effect(places * 0, np.ones(12), groups, is_ordered=True) == 1.0


@pytest.mark.parametrize(("documents", "size", "times"), [(20, 50, 60), (200, 10, 20)])
def test_shuffled_pages_are_calm_if_a_column_names_them(documents: int, size: int, times: int) -> None:
    """Without the column, 8 of 8 are refused."""
    generator = np.random.default_rng(6)
    unnamed = [(drawn(generator, 20, 50, group="page"), drawn(generator, 20, 50, group="page")) for _ in range(8)]
    assert all(any(column.level == "refuse" for column in moved(*pair)) for pair in unnamed)
    pairs = [[drawn(generator, documents, size, group="group") for _ in range(2)] for _ in range(times)]
    assert sum(bool(moved(before, after)) for before, after in pairs) <= 2


def test_longer_shuffled_pages_are_refused_if_a_column_names_them() -> None:
    generator = np.random.default_rng(7)
    for _ in range(5):
        found = moved(drawn(generator, 60, 20, group="group"), drawn(generator, 60, 20, longer=3.0, group="group"))
        assert [(column.column, column.level) for column in found] == [("prompt_tokens", "refuse")]


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

"""Rows in documents: their effect on a column, and what the drift gate makes of it."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from rlcore.data_contracts.drift.comparison import ColumnDrift, DriftLimits, compare_columns
from rlcore.data_contracts.drift.sketches import Sketch, design_effect, group_effect, sketch


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


@pytest.mark.parametrize(("documents", "size", "times"), [(20, 50, 200), (200, 10, 40)])
def test_shuffled_pages_are_calm_if_a_column_names_them(documents: int, size: int, times: int) -> None:
    """Without the column, 20 of 20 are refused."""
    generator = np.random.default_rng(6)
    unnamed = [(drawn(generator, 20, 50, group="page"), drawn(generator, 20, 50, group="page")) for _ in range(20)]
    assert all(any(column.level == "refuse" for column in moved(*pair)) for pair in unnamed)
    pairs = [[drawn(generator, documents, size, group="group") for _ in range(2)] for _ in range(times)]
    assert sum(bool(moved(before, after)) for before, after in pairs) <= 2


def test_longer_shuffled_pages_are_refused_if_a_column_names_them() -> None:
    generator = np.random.default_rng(7)
    for _ in range(5):
        found = moved(drawn(generator, 60, 20, group="group"), drawn(generator, 60, 20, longer=3.0, group="group"))
        assert [(column.column, column.level) for column in found] == [("prompt_tokens", "refuse")]

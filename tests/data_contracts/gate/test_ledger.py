from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rlcore.data_contracts.gate.ledger import COLUMNS, LedgerBuilder, is_repeated


def batch(names: list[int], turns: list[tuple[int, int]]) -> dict[str, np.ndarray]:
    """The columns of a batch: its names in all columns, and the keys of turns by row of the batch."""
    columns = {name: np.array(names, dtype=np.int64) for name in COLUMNS}
    rows, keys = np.array(turns, dtype=np.int64).reshape(-1, 2).T
    return {**columns, "turn_row": rows, "turn_key": keys.astype(np.uint64)}


def digests(contents: list[tuple[int, int]]) -> np.ndarray:
    return np.array(contents, dtype=np.uint64).reshape(-1, 2)


def test_of_equal_rows_the_first_stays_in_its_place_with_its_turns() -> None:
    builder = LedgerBuilder()
    builder.add(batch([7, 8], [(0, 70), (0, 71), (1, 80)]), digests([(1, 1), (1, 2)]))
    builder.add(batch([9, 5, 6], [(0, 90), (2, 60)]), digests([(1, 1), (0, 1), (1, 2)]))
    ledger, is_first = builder.finish()
    assert is_first.tolist() == [True, True, False, True, False]
    assert ledger.name.tolist() == ledger.line.tolist() == [7, 8, 5]
    assert list(zip(ledger.turn_row.tolist(), ledger.turn_key.tolist(), strict=True)) == [(0, 70), (0, 71), (1, 80)]


@given(st.lists(st.integers(0, 5), max_size=12))
def test_a_value_is_repeated_where_another_place_has_it(values: list[int]) -> None:
    assert is_repeated(np.array(values, dtype=np.int64)).tolist() == [values.count(value) > 1 for value in values]

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcore.data_contracts.errors import ContractError
from rlcore.data_contracts.gate.ledger import EVAL, TRAIN
from rlcore.data_contracts.gate.splits import assign, held_out_prompts, is_held_out, representatives, select


def held_out(hashes: Sequence[int], *, first: Collection[int] = ()) -> set[int]:
    """The prompts that are held out, by their hashes."""
    found = np.array(hashes, dtype=np.uint64)
    mask = held_out_prompts(found, first=np.isin(found, list(first)))
    return set(found[mask].tolist())


def test_one_hash_in_ten_is_held_out() -> None:
    held = sum(is_held_out(hashlib.sha256(str(n).encode()).hexdigest()) for n in range(20_000))
    assert 1900 < held < 2100  # 2,000 expected, standard deviation 42


def test_the_smallest_hashes_are_held_out_and_reserved_prompts_before_them() -> None:
    hashes = [*range(20), 1, 1]  # 20 prompts, of which a tenth is held out
    assert held_out(hashes) == {0, 1}
    assert held_out(hashes, first=[5, 99]) == {0, 5}
    assert held_out(hashes, first=[4, 5, 6]) == {4, 5, 6}
    assert held_out([3, 2]) == {2}  # at least one


@given(st.lists(st.integers(0, 19), min_size=1, max_size=60))
def test_no_prompt_is_on_both_sides(hashes: list[int]) -> None:
    prompts = np.array(hashes, dtype=np.uint64)
    mask = held_out_prompts(prompts, first=prompts < 0)
    splits = assign(np.zeros(len(prompts), dtype=np.int8), mask, where="")
    assert not set(prompts[splits == TRAIN].tolist()) & set(prompts[splits == EVAL].tolist())


def test_prompts_that_ask_the_same_stand_behind_the_one_with_the_smallest_hash() -> None:
    keys, spellings = np.array([7, 3, 7, 7], dtype=np.uint64), np.array([30, 20, 10, 40], dtype=np.uint64)
    assert representatives(keys, spellings).tolist() == [2, 1, 2, 2]


def test_a_split_of_the_source_is_kept_and_half_a_split_is_refused() -> None:
    none = np.array([True, False])
    assert assign(np.array([TRAIN, EVAL]), none, where="").tolist() == [TRAIN, EVAL]
    with pytest.raises(ContractError, match="1 of 2 rows have no 'split'"):
        assign(np.array([TRAIN, 0]), none, where="rows.jsonl")


def test_each_prompt_gives_one_row_before_any_gives_a_second() -> None:
    prompts = np.array([1, 1, 1, 2, 2, 3])
    kept = select(np.full(6, EVAL), prompts, prompts.astype(np.uint64), num_train=1, num_eval=4)
    # Turns: rows 0, 3 and 5 are the first of their prompts, 1 and 4 the second, 2 the third: those four and row 1.
    assert np.flatnonzero(kept).tolist() == [0, 1, 3, 5]


def test_the_rows_that_come_first_are_kept_on_each_side_and_all_where_there_are_no_more() -> None:
    split = np.array([TRAIN, EVAL] * 4)
    order = np.array([5, 0, 1, 0, 2, 0, 9, 0], dtype=np.uint64)
    assert np.flatnonzero(select(split, np.arange(8), order, num_train=2, num_eval=9)).tolist() == [1, 2, 3, 4, 5, 7]

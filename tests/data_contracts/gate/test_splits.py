"""Rows that count, and their side: equal rows, contradictions, and splits."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.data_contracts.errors import ContractError
from rlcore.data_contracts.gate.ledger import COLUMNS, EVAL, TRAIN, LedgerBuilder, is_repeated
from rlcore.data_contracts.gate.splits import assign, held_out_prompts, is_held_out, representatives, select
from tests.data_contracts.gate.gating import gate_rows


def held_out(hashes: Sequence[int], *, first: Collection[int] = ()) -> set[int]:
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


MIRRORED = "another pair prefers the same answers the other way"
CIRCLE = "the pairs of its prompt prefer in a circle"


def pair(name: str, chosen: str, rejected: str, question: str = "Best?", **changes: Any) -> dict[str, Any]:
    return {
        "pair_id": name,
        "messages": [{"role": "user", "content": question}],
        "chosen": chosen,
        "rejected": rejected,
        "source": "t",
        **changes,
    }


def reasons(rows: list[dict[str, Any]], **limits: Any) -> dict[int, str]:
    result = gate_rows([*rows, pair("o", "x", "y", "Other?")], max_tokens=50, max_quarantined=1.0, **limits)
    return {one.origin.line: one.reason for one in result.quarantine}


def test_a_circle_takes_its_own_pairs_and_leaves_those_that_hang_on_it() -> None:
    rows = [pair("1", "a", "b"), pair("2", "b", "c"), pair("3", "c", "a"), pair("4", "a", "d"), pair("5", "e", "b")]
    assert reasons(rows) == {1: CIRCLE, 2: CIRCLE, 3: CIRCLE}


def test_a_mirrored_pair_within_a_circle_has_the_closer_reason() -> None:
    rows = [pair("1", "a", "b"), pair("2", "b", "a"), pair("3", "b", "c"), pair("4", "c", "a")]
    assert reasons(rows) == {1: MIRRORED, 2: MIRRORED, 3: CIRCLE, 4: CIRCLE}


def test_answers_and_prompts_are_compared_as_they_look_unless_exactly() -> None:
    rows = [pair("1", "good", "bad"), pair("2", "b\u0430d", "good\u200b", "  BEST ?")]
    assert reasons(rows) == {1: MIRRORED, 2: MIRRORED}
    assert reasons(rows, is_exact=True) == {}


def test_equal_judgements_of_two_rows_are_no_contradiction() -> None:
    assert reasons([pair("1", "a", "b"), pair("2", "a", "b"), pair("3", "b", "c"), pair("4", "a", "c")]) == {}


@pytest.mark.parametrize("is_exact", [False, True])
def test_references_are_compared_as_they_look(is_exact: bool) -> None:
    def row(name: str, question: str, reference: str) -> dict[str, Any]:
        messages = [{"role": "user", "content": question}]
        return {"prompt_id": name, "messages": messages, "reference": reference, "task": "t"}

    rows = [row("a", "Why?", "x"), row("b", "why", "x\u200b"), row("c", "How?", "1"), row("d", "HOW ?", "2")]
    rows += [row("e", "Who?", "3")]
    result = gate_rows(rows, "prompts", max_quarantined=1.0, is_exact=is_exact)
    assert [one.origin.line for one in result.quarantine] == ([] if is_exact else [3, 4])


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)).filter(lambda one: one[0] != one[1]), max_size=10))
def test_what_is_left_is_an_order_and_what_went_was_on_a_circle(judged: list[tuple[int, int]]) -> None:
    edges = list(dict.fromkeys(judged))
    refused = reasons([pair(str(place), f"a{one}", f"a{other}") for place, (one, other) in enumerate(edges)])

    def leads(start: int, end: int, among: list[tuple[int, int]]) -> bool:
        seen, todo = {start}, [start]
        while todo:
            todo = [other for one, other in among if one in todo and other not in seen]
            seen |= set(todo)
        return end in seen

    # Plain search: a pair goes if and only if its worse answer leads back to its better one.
    assert {line - 1 for line in refused} == {
        place for place, (one, other) in enumerate(edges) if leads(other, one, edges)
    }

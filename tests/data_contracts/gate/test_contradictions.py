"""Rows of which another row says the opposite."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data_contracts.gate.gating import gate_rows

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
    """Return the reason against each line."""
    result = gate_rows([*rows, pair("o", "x", "y", "Other?")], max_tokens=50, max_quarantined=1.0, **limits)
    return {one.origin.line: one.reason for one in result.quarantine}


def test_a_circle_takes_its_own_pairs_and_leaves_those_that_hang_on_it() -> None:
    rows = [pair("1", "a", "b"), pair("2", "b", "c"), pair("3", "c", "a"), pair("4", "a", "d"), pair("5", "e", "b")]
    assert reasons(rows) == {1: CIRCLE, 2: CIRCLE, 3: CIRCLE}


def test_a_circle_of_one_prompt_is_none_of_two() -> None:
    assert reasons([pair("1", "a", "b"), pair("2", "b", "c"), pair("3", "c", "a", "Worst?")]) == {}


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

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcore.types import Score, is_correct, turn_spans


@given(mask=st.lists(st.booleans(), max_size=20))
def test_turns_are_the_runs_of_own_tokens(mask: list[bool]) -> None:
    spans = turn_spans(mask)
    inside = {place for start, end in spans for place in range(start, end)}
    assert [place in inside for place in range(len(mask))] == mask
    assert all(start < end for start, end in spans)
    assert all(before[1] < after[0] for before, after in pairwise(spans))  # never two in a row


def test_turns_are_the_spans_of_the_docstring() -> None:
    assert turn_spans([True, True, False, True]) == ((0, 2), (3, 4))
    assert turn_spans([]) == ()


@pytest.mark.parametrize(
    ("value", "expected"), [(1.0, True), (0.99, True), (0.989, False), (0.0, False), (None, False)]
)
def test_an_answer_is_correct_from_ninety_nine_hundredths(value: float | None, expected: bool) -> None:
    assert is_correct(Score(value=value, terms={})) is expected

"""Checks of one column: which cells pass."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from rlcore.data_contracts.contracts import column_checks


def turn(role: str, content: object = "text") -> dict[str, object]:
    return {"role": role, "content": content}


@pytest.mark.parametrize(
    ("text", "passed"),
    [("a", True), (" a ", True), ("", False), (" \n\t", False), ("a\0b", False), ("\u200b\ufeff", False)],
)
def test_a_text_is_filled_with_something_that_a_reader_sees(text: str, passed: bool) -> None:
    assert column_checks.is_filled(text) == passed


@pytest.mark.parametrize(
    ("roles", "is_plain", "is_with_calls"),
    [
        (["user"], True, True),
        (["system", "user"], True, True),
        (["user", "assistant", "user"], True, True),
        (["user", "assistant"], False, False),  # answered already
        (["user", "system", "user"], False, False),  # a system message comes first
        (["system"], False, False),
        (["user", "tool"], False, False),
        ([], False, False),
        (["user", "assistant", "tool"], False, True),
        (["user", "assistant", "tool", "assistant", "tool"], False, True),
        (["assistant", "tool"], False, False),
        (["user", "tool", "assistant"], False, False),
        (["user", "assistant", "tool", "tool"], False, False),
    ],
)
def test_a_question_waits_for_an_answer_and_calls_of_tools_may_follow_it_in_pairs(
    roles: list[str], is_plain: bool, is_with_calls: bool
) -> None:
    conversation = [turn(role) for role in roles]
    assert column_checks.is_question(conversation) is is_plain
    assert column_checks.is_question_with_calls(conversation) is is_with_calls


@pytest.mark.parametrize(
    "value",
    [
        *([turn("system"), turn("user", content)] for content in ("", "  ", "a\0b", None, 7)),
        *(None, "user", {"role": "user"}, [{"role": "user"}], [turn("user") | {"name": "x"}], [None]),
    ],
    ids=ascii,
)
def test_a_turn_that_is_blank_or_no_text_or_no_turn_makes_no_question(value: object) -> None:
    assert not column_checks.is_question(value)


@pytest.mark.parametrize(
    ("check", "value", "passed"),
    [
        (column_checks.is_list_of_texts, ["a", "b"], True),
        (column_checks.is_list_of_texts, ["a"], False),
        (column_checks.is_list_of_texts, ["a", " "], False),
        (column_checks.is_list_of_texts, "ab", False),
        (column_checks.is_list_of_counts, [0, 3], True),
        (column_checks.is_list_of_counts, [], False),
        (column_checks.is_list_of_counts, [-1], False),
        (column_checks.is_list_of_counts, [True], False),
        (column_checks.is_list_of_counts, [1.0], False),
        (column_checks.is_list_of_booleans, [True, False], True),
        (column_checks.is_list_of_booleans, [], True),
        (column_checks.is_list_of_booleans, [1], False),
        (column_checks.is_list_of_logprobs, [-0.5, 0.0], True),
        (column_checks.is_list_of_logprobs, [5e-7], True),  # the rounding of a softmax
        (column_checks.is_list_of_logprobs, [2e-6], False),
        (column_checks.is_list_of_logprobs, [math.nan], False),
        (column_checks.is_list_of_logprobs, [-math.inf], False),
        (column_checks.is_list_of_logprobs, [-1], False),
        (column_checks.is_list_of_logprobs, [], True),
        (column_checks.is_list_of_logprobs, None, False),
    ],
)
def test_a_list_has_the_values_that_its_column_wants(
    check: Callable[[object], bool], value: object, passed: bool
) -> None:
    assert check(value) is passed

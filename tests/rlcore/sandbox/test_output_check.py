"""Outputs and values are compared as a judge of programs would."""

from __future__ import annotations

import math
from typing import Any

import pytest

from rlcore.sandbox.output_check import same_text, same_value, shown
from tests.quick import within_seconds


@pytest.mark.parametrize(
    ("expected", "printed", "same"),
    [
        ("1 2\n", "1 2", True),
        ("1 2", "1 2  \n\n", True),
        ("a\nb", "a \nb\n", True),
        ("1", "1\n2", False),
        ("1 2", "1  2", True),
        ("1 2", " 1 2", True),
        ("a\tb", "a b", False),
        ("  *\n ***", "*\n***", False),
        (" 1", "1", False),
        ("1 2", "1\n2", False),
        ("1\n2", "1\n\n2", False),
        ("", "\n", True),
        ("", "0", False),
        ("1", "1.0", True),
        ("1", "1.0000001", False),
        ("1", "0.9999999", False),
        ("1e3", "1000", True),
        ("1000", "1E+3", True),
        ("9007199254740993", "9007199254740992.0", False),
        ("0.0", "-0.0", True),
        ("0", "-0", True),
        ("0.5", "1/2", False),
        ("0.5", ".5", True),
        ("0.333333", "0.3333333333333333", True),
        ("0.3333333333", "0.333", False),
        ("2500000.0", "2500001.0", True),  # 4e-7 of it
        ("2500000.0", "2500010.0", False),
        ("0.001", "0.0010000001", True),
        ("007", "7", False),
        ("0101", "101", False),
        ("+7", "7", False),
        ("7", "\u0667", False),
        ("1e400", "1e401", False),
        ("1e99999", "1e99999", True),
        ("nan", "nan", True),
        ("inf", "1e999", False),
        ("x = 0.1000000000", "x = 0.1", True),
        ("YES", "Yes", False),
        ("1" * 5_000, "1" * 5_000, True),
        ("1" * 5_000, "1" * 4_999 + "2", False),
    ],
)
def test_outputs_are_equal_in_their_words_and_in_the_value_of_their_numbers(
    expected: str, printed: str, same: bool
) -> None:
    assert same_text(expected, printed) is same


@pytest.mark.parametrize(
    ("expected", "value", "same"),
    [
        (1, 1, True), (1, 1.0, True), (1, True, False), (True, 1, False), (True, True, True), (0, False, False),
        (0, None, False), (None, None, True), ([1, [2]], (1, (2,)), True), ([1], {1}, False), ([1], [1, 1], False),
        ([True], [1], False), ({"a": [1]}, {"a": (1,)}, True), ({"a": 1}, {"a": True}, False),
        ({"a": 1}, {"a": 1, "b": 2}, False), ({"1": 1}, {1: 1}, True), ({"1": 1}, {1: 1, "1": 1}, False),
        ({"1": 1, "2": 1}, {1: 1}, False), ({"true": 1}, {True: 1}, True), ({"null": 1}, {None: 1}, True),
        ({"1.5": 1}, {1.5: 1}, True), ({"(1, 2)": 1}, {(1, 2): 1}, False), (0.3, 0.1 + 0.2, True), (0.3, 0.31, False),
        ([0.1, [0.2]], (0.1 + 1e-12, [0.2]), True), (3.0, 3, True), (3, 3.0000001, False), (3, 3.0, True),
        (10**400, 1e308, False), (0.5, 10**400, False), ([10**5000], [10**5000], True), (math.nan, math.nan, True),
        (math.inf, math.inf, True), (math.inf, 1e308, False), ([1, 2], {1, 2}, False), ("a", b"a", False),
        ("1", 1, False), (1.5, math.nan, False),
    ],
)  # fmt: skip
def test_values_are_equal_as_json_has_them(expected: Any, value: Any, same: bool) -> None:
    assert same_value(expected, value) is same


def test_a_task_may_set_its_own_tolerance() -> None:
    assert same_text("3.14", "3.1415", 0.01)
    assert not same_text("3.14", "3.1400001", 0.0)
    assert same_text("100", "100.4", 0.01)  # a tolerance of the task holds for integers too
    assert same_value([1.0], [1.05], 0.1)
    assert not same_value(0.3, 0.1 + 0.2, 0.0)


@pytest.mark.parametrize("value", [[10**6_000], "x" * 10_000, list(range(10**5)), {"a": ["b" * 999]}, None])
def test_a_value_is_shown_in_a_few_words(value: Any) -> None:
    assert len(shown(value)) < 500


def test_comparing_much_output_is_quick() -> None:
    numbers = "".join(f"{n / 7:.9f} {n}\n" for n in range(50_000))
    other = "".join(f"{n / 7:.7f}  {n}\n" for n in range(50_000))
    with within_seconds():
        assert same_text(numbers, other)
        assert not same_text("1 " * 300_000, "1" * 600_000)
        assert not same_text("\t" * 300_000, " " * 300_000 + "x")

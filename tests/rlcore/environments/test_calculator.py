"""The calculator: exact, bounded, and never Python."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcore.environments.base import ToolOutput
from rlcore.environments.calculator import MAX_BITS, CalculatorTool, calculate, write_number


def answer(expression: str) -> str:
    (output,) = CalculatorTool()([expression])
    assert isinstance(output, ToolOutput)
    assert output.is_error == output.text.startswith("error: ")
    return output.text


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("3+4", "7"),
        (" 12 * (3 + 4) ", "84"),
        ("123*456", "56088"),
        ("0.1+0.2", "0.3"),  # a float would give 0.30000000000000004
        ("1/3", "1/3"),
        ("-7/2", "-3.5"),
        ("-7//2", "-4"),
        ("-7%3", "2"),
        ("2**10", "1024"),
        ("2**-2", "0.25"),
        ("--2", "2"),
        ("+.5", "0.5"),
        ("0**0", "1"),
        ("1/1024", "0.0009765625"),
        ("9007199254740993", "9007199254740993"),  # 2^53 + 1, which no float holds
    ],
)
def test_arithmetic_is_exact(expression: str, expected: str) -> None:
    assert answer(expression) == expected


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("", "an expression is made of"), ("1/0", "division by zero"), ("0**-1", "division by zero"),
        ("5%0", "division by zero"), ("3+", "no whole expression"), ("(" * 99 + "1" + ")" * 99, None),
        ("()", "an expression is made of"), ("...", "Invalid literal"), ("1 2", "no whole expression"),
        ("007", "no whole expression"), ("9**9**9", "an exponent is"), ("99**2000", "too large"),
        ("(2**2000)*(2**2000)", "too large"), ("2**0.5", "an exponent is"), ("1" * 201, "at most 200"),
        ("__import__('os')", "an expression is made of"), ("abs(1)", "an expression is made of"),
        ("1e9", "an expression is made of"), ("٣+٤", "an expression is made of"),
        ("3+4\n+1", "an expression is made of"), ("True", "an expression is made of"),
    ],
)  # fmt: skip
def test_what_is_no_arithmetic_is_an_error_for_the_policy(expression: str, message: str | None) -> None:
    if message is None:
        assert answer(expression) == "1"
    else:
        assert message in answer(expression)
        assert answer(expression).startswith("error: ")


@given(st.text(alphabet="0123456789.+-*/%() ", max_size=210))
def test_any_text_has_a_short_answer(expression: str) -> None:
    assert 0 < len(answer(expression)) <= MAX_BITS


@given(a=st.integers(0, 10**9), b=st.integers(0, 10**9), c=st.integers(1, 10**6))
def test_values_are_those_of_rational_arithmetic(a: int, b: int, c: int) -> None:
    assert calculate(f"({a}-{b})*{b}/{c}+{a}") == Fraction((a - b) * b, c) + a


@given(st.fractions())
def test_a_number_is_written_so_that_it_reads_back(value: Fraction) -> None:
    assert Fraction(write_number(value)) == value

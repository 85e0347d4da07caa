"""Plain numbers are read exactly or not at all."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcore.rewards.plain_numbers import parse_number
from tests.quick import within_seconds


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("35", "35"),
        ("-3", "-3"),
        ("−3", "-3"),
        ("+3", "3"),
        ("007", "7"),
        ("1.10", "11/10"),
        (".5", "1/2"),
        ("5.", "5"),
        ("1e3", "1000"),
        ("1.5E-2", "3/200"),
        ("1,234.50", "2469/2"),
        ("1{,}234", "1234"),
        (r"1\,234\,567", "1234567"),
        ("3/4", "3/4"),
        ("-3 / 4", "-3/4"),
        ("3/-4", "-3/4"),
        (r"\frac{3}{4}", "3/4"),
        (r"-\dfrac{3}{4}", "-3/4"),
        (r"\tfrac34", "3/4"),
        (r"\frac{-1.5}{3}", "-1/2"),
        ("$18", "18"),
        (r"\$18.00", "18"),
        ("-$18", "-18"),
        ("€5", "5"),
    ],
)
def test_plain_numbers_are_read_exactly(text: str, value: str) -> None:
    number = parse_number(text)
    assert number is not None
    assert (number.value, number.is_percent) == (Fraction(value), False)


@pytest.mark.parametrize(
    "text",
    [
        *("", "-", ".", "%", "x", "--3", "1.2.3", "1/2/3", "1+1", "2^3", "5 cm", "inf", "nan"),
        *("3/0", r"\frac{1}{0}", "1,23", "12,34,567", "1 000", "1_000", "0x10", "1e", "1e999", "9" * 201),
        *("５", "٣", "²"),
    ],
)
def test_anything_else_is_no_plain_number(text: str) -> None:
    assert parse_number(text) is None


def test_a_percentage_equals_neither_its_number_nor_its_share() -> None:
    percent = parse_number(r"50\%")
    assert percent == parse_number("50 %") == parse_number("100/2%")
    assert percent != parse_number("50")
    assert percent != parse_number("0.5")


@pytest.mark.parametrize(
    ("text", "is_evaluated"),
    [
        ("3", True),
        ("3/4", True),
        (r"\frac{3}{4}", True),
        ("6/2", False),
        ("2/4", False),
        ("5/1", False),
        ("1.5/2", False),
    ],
)
def test_a_division_left_to_be_done_is_not_evaluated(text: str, is_evaluated: bool) -> None:
    number = parse_number(text)
    assert number is not None
    assert number.is_evaluated is is_evaluated


@given(st.fractions())
def test_every_fraction_is_read_back(value: Fraction) -> None:
    for text in (f"{value.numerator}/{value.denominator}", rf"\frac{{{value.numerator}}}{{{value.denominator}}}"):
        number = parse_number(text)
        assert number is not None
        assert number.value == value


@given(st.integers(-(10**12), 10**12), st.integers(0, 6))
def test_every_decimal_is_read_back_with_and_without_separators(unscaled: int, places: int) -> None:
    value = Fraction(unscaled, 10**places)
    whole, rest = divmod(abs(unscaled), 10**places)
    decimals = f".{rest:0{places}d}" if places else ""
    sign = "-" if unscaled < 0 else ""
    for text in (f"{sign}{whole}{decimals}", f"{sign}{whole:,}{decimals}"):
        number = parse_number(text)
        assert number is not None
        assert number.value == value


@given(st.text(max_size=40))
def test_no_text_raises(text: str) -> None:
    parse_number(text)


@pytest.mark.parametrize("text", ["9" * 100_000, "1," * 50_000, "{,}" * 50_000, "1e" * 50_000, "/" * 100_000])
def test_reading_is_quick_for_any_text(text: str) -> None:
    with within_seconds():
        parse_number(text)

r"""Equality is exact: against Python's fractions for rational numbers, and at sizes where floats see nothing."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcore.rewards.mathematics.exact_values import constant_free_key, equal_values
from rlcore.rewards.mathematics.formula import Node, add, mul, number, power
from rlcore.rewards.mathematics.numeric_values import UndefinedError
from rlcore.rewards.mathematics.reader import parse_formula
from tests.quick import within_seconds

leaves = st.fractions(min_value=-20, max_value=20, max_denominator=20).map(number)
rational_formulas = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.builds(lambda a, b: add(a, b), inner, inner),
        st.builds(lambda a, b: mul(a, b), inner, inner),
        st.builds(lambda a, n: power(a, number(n)), inner, st.integers(0, 3)),
    ),
    max_leaves=8,
)


def value(node: Node) -> Fraction:
    """The slow, obvious value of a rational formula."""
    if node.kind == "number":
        return Fraction(node.value)
    values = [value(each) for each in node.args]
    if node.kind == "add":
        return values[0] + values[1]
    if node.kind == "mul":
        return values[0] * values[1]
    if values[0] == 0 and values[1] == 0:
        raise ZeroDivisionError
    return Fraction(values[0] ** int(values[1]))


@given(rational_formulas, rational_formulas)
def test_rational_formulas_are_equal_exactly_when_their_fractions_are(first: Node, second: Node) -> None:
    try:
        expected = value(first) == value(second)
    except ZeroDivisionError:
        return
    assert equal_values(first, second) is expected
    assert equal_values(first, number(value(first)))


@given(st.integers(2, 30), st.integers(2, 30), st.integers(0, 10**6))
def test_sums_of_roots_are_equal_exactly_when_they_are(first: int, second: int, tiny: int) -> None:
    """(√a + √b)² = a + b + 2√(ab); with a tiny number more it is another."""
    whole = parse_formula(rf"\sqrt{{{first}}}+\sqrt{{{second}}}")
    nested = parse_formula(rf"\sqrt{{{first + second}+2\sqrt{{{first * second}}}}}")
    assert equal_values(whole, nested)
    assert not equal_values(whole, add(nested, power(number(3), number(-(tiny % 997) - 1))))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (r"2^{9999999}", r"2^{9999998}"), (r"9^{9^9}", "5"), (r"\frac{7000!}{5^{3000}}", r"\frac{7000!}{5^{3001}}"),
        (r"1-\frac{1}{40000!}", r"1-\frac{1}{40001!}"), (r"\sqrt{5}+3^{-9000}", r"\sqrt{5}+3^{-9001}"),
        (r"x^{99999}+1", r"x^{99998}+1"), (r"\pi^{200}", r"\pi^{201}"),
    ],
)  # fmt: skip
def test_huge_numbers_differ_at_once(first: str, second: str) -> None:
    with within_seconds():
        assert not equal_values(parse_formula(first), parse_formula(second))
        assert equal_values(parse_formula(first), parse_formula(first + "+0"))


@pytest.mark.parametrize("text", ["1/0", "0^0", "(2-2)^{0}", r"\frac{x}{3-3}", r"0^{-1}"])
def test_what_has_no_value_equals_nothing(text: str) -> None:
    with pytest.raises(UndefinedError):
        equal_values(parse_formula(text), parse_formula(text))
    assert not equal_values(parse_formula("1"), parse_formula(text))


@pytest.mark.parametrize(
    ("first", "second", "is_equal"),
    [
        (r"\sin^2 x+\cos^2 x", "1", True), (r"2\sin x\cos x", r"\sin 2x", True),
        ("3*2^{n-1}", r"\frac{3}{2}2^n", True), ("n!", "n(n-1)!", True), ("(-1)^n", r"\cos(\pi n)", True),
        (r"2\ln x", r"\ln x^2", True), (r"\ln|x|", r"\ln x", False), (r"\sqrt{x^2}", "x", False),
        (r"\sqrt[3]{x^3}", "x", True), (r"\frac{x^2-1}{x-1}", "x+1", True), (r"\sin x+2^{-500}", r"\sin x", False),
        (r"e^{i\pi}", "-1", True), (r"\infty", r"-\infty", False),
    ],
)  # fmt: skip
def test_functions_are_compared_where_both_have_a_value(first: str, second: str, is_equal: bool) -> None:
    assert equal_values(parse_formula(first), parse_formula(second)) is is_equal
    assert equal_values(parse_formula(second), parse_formula(first)) is is_equal


def test_a_constant_factor_does_not_change_a_formulas_key() -> None:
    keys = [constant_free_key(parse_formula(text)) for text in ("x-3", "6-2x", "x+3")]
    assert keys[0] == keys[1] != keys[2]

"""Verdicts decided by hand before they were run. ``R`` answers the reference, ``W`` does not.

The policy behind them (docs/rewards.md): exact values; a percent sign on both sides or on neither; units, currencies
and degrees are not compared; a sentence or ``x = 5`` states what it ends with, and has no other ``=`` unless the
reference has one; one answer, not two; the kind of brackets counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcore.rewards.answers import clean
from rlcore.rewards.math_answer import MathOptions, MathReward, compare_exact
from rlcore.rewards.units import with_percent_sign
from rlcore.types import Rollout
from tests.quick import within_seconds

R, W = 1.0, 0.0

NUMBERS = [
    ("5", "5", R),
    ("5.0", "5", R),
    ("5.", "5", R),
    ("+5", "5", R),
    ("-5", "5", W),
    ("- 5", "-5", R),
    ("−5", "-5", R),
    ("--5", "5", R),
    ("007", "7", R),
    (".5", "0.5", R),
    ("0.50", ".5", R),
    ("-.5", "-1/2", R),
    ("-0", "0", R),
    ("0.1234568", "0.1234567", W),
    ("0.12345670", "0.1234567", R),
    ("100000000000000000001", "100000000000000000000", W),
    ("0.1000000000000000000001", "0.1", W),
    ("1,000", "1000", R),
    ("1000", "1,000", R),
    ("1,234,567.5", "1234567.5", R),
    ("1{,}000", "1000", R),
    (r"1\,000", "1000", R),
    (r"1,\!000", "1000", R),
    ("1,00", "100", W),
    ("1,0000", "10000", W),
    ("1,000", "1", W),
    ("1.000", "1000", W),
    ("12,34", "12.34", W),
    ("1e3", "1000", R),
    ("1E3", "1000", R),
    ("1.5e-3", "0.0015", R),
    (r"1.5 \times 10^3", "1500", R),
    (r"1.5 \cdot 10^{3}", "1500", R),
    ("1.5×10^3", "1500", R),
    ("1.5*10^3", "1500", R),
    (r"2 \times 10^{-2}", "0.02", R),
    (r"1.5 \times 10^3", "150", W),
    ("10^3", "1000", R),
    ("1e999999999", "5", W),
    ("five", "5", W),
    ("", "5", W),
    ("?", "5", W),
    ("NaN", "5", W),
    (r"\infty", "5", W),
    (r"-\infty", r"\infty", W),
    (r"\infty", r"\infty", R),
    ("５", "5", W),
    ("٥", "5", W),
    ("x²", "x^2", W),
    ("½", "1/2", W),
    ("1½", "11/2", W),
    ("5...", "5", W),
    ("0x5", "5", W),
    ("1_000", "1000", W),
]
FRACTIONS = [
    ("1/2", "0.5", R),
    ("0.5", r"\frac{1}{2}", R),
    ("2/4", "1/2", R),
    ("-1/2", r"-\frac12", R),
    ("1/-2", "-1/2", R),
    (r"\frac{-1}{2}", "-0.5", R),
    (r"\dfrac{3}{4}", "0.75", R),
    (r"\tfrac34", "0.75", R),
    (r"\frac 3 4", "0.75", R),
    (r"\cfrac{3}{4}", "0.75", R),
    ("3/4", "4/3", W),
    ("0.333", "1/3", W),
    ("0.3333333333333333", "1/3", W),
    (r"0.\overline{3}", "1/3", R),
    (r"0.1\overline{6}", "1/6", R),
    (r"0.\overline{3}", "0.3", W),
    ("1/0", "5", W),
    ("0/0", "0", W),
    ("0/0", "1", W),
    ("6/2", "3", R),
    ("1 1/2", "3/2", R),
    (r"1\frac{1}{2}", "1.5", R),
    (r"1 \frac{1}{2}", "1.5", R),
    (r"-1\frac{1}{2}", "-1.5", R),
    (r"-1\frac{1}{2}", "-0.5", W),
    ("1 1/2", "11/2", W),
    ("1 3/2", "2.5", W),
    (r"2\frac{1}{3}", "2/3", W),
    ("3:4", "3/4", R),  # a ratio is its value
    ("4:3", "3/4", W),
    ("3:4", "3:4", R),
]
PERCENTS_AND_UNITS = [
    (r"50\%", r"50\%", R),
    ("50%", r"50\%", R),
    ("50.0%", "50%", R),
    ("1/2%", "0.5%", R),
    (r"50\%", "50", W),
    (r"50\%", "0.5", W),
    ("0.5", r"50\%", W),
    ("50", r"50\%", W),
    (r"50\text{ percent}", "50", W),
    ("50 percent", "50", W),
    ("50 percent", "50%", R),
    (r"50\%\%", r"50\%", W),
    (r"51\%", r"50\%", W),
    ("$18", "18", R),
    (r"\$18", "18", R),
    (r"\$18.00", "18", R),
    (r"\$1,800", "1800", R),
    ("-$5", "-5", R),
    (r"\$-5", "-5", R),
    ("€18", "18", R),
    ("18€", "18", R),
    ("18 €", "18", R),
    ("£18.50", "18.5", R),
    ("18 dollars", "18", R),
    (r"18\text{ dollars}", "18", R),
    ("18 USD", "18", R),
    ("18 cents", "19", W),
    ("18", r"\$18", R),
    (r"5\text{ cm}", "5", R),
    (r"5 \, \text{cm}", "5", R),
    (r"5\,\mathrm{cm}^2", "5", R),
    ("5 cm", "5", R),
    ("5", r"5\text{ cm}", R),
    ("5 apples", "5", R),
    ("6 apples", "5", W),
    (r"5 \text{ apples}", "6", W),
    ("5 million", "5", W),
    ("5 million", "5000000", R),
    (r"5 \text{ million}", "5", W),
    ("5 dozen", "5", W),
    (r"5\text{ thousand}", "5", W),
    ("5 hundred", "5", W),
    ("5 km/h", "5", R),
    (r"x=\mathbf{5}", "5", R),
    (r"-\!1", "-1", R),
    (r"|AB|=2\sqrt3", r"2\sqrt3", R),
    (r"\text{The answer is } 5", "5", R),
    (r"\text{The answer is not } 5", "5", W),
    ("5cm", "5", R),
    ("5 miles per hour", "5", R),
    ("18 dollars and 50 cents", "18", W),
    ("18 dollars and 50 cents", "18.5", W),
    ("5 squared", "5", W),
    ("5 plus two", "5", W),
    ("5 x", "5", W),
    (r"5\text{ m}", "5", R),
    ("5", r"5 \text{ million}", W),
    (r"5 \text{ million}", "5 million", R),
    ("5 or more", "5", W),
    ("5 and 6", "5", W),
    ("5 and 6", "6", W),
    ("not 5", "5", W),
    (r"90^\circ", "90", R),
    (r"90^{\circ}", "90", R),
    ("90°", "90", R),
    ("90 degrees", "90", R),
    ("90", r"90^\circ", R),
    (r"91^\circ", "90", W),
]
WRAPPERS = [
    ("$5$", "5", R),
    ("$$5$$", "5", R),
    (r"\(5\)", "5", R),
    (r"\[5\]", "5", R),
    ("**5**", "5", R),
    ("`5`", "5", R),
    ("**$5$.**", "5", R),
    ("5,", "5", R),
    (r"\text{5}", "5", R),
    (r"\mathbf{5}", "5", R),
    (r"\textbf{5}", "5", R),
    (r"\mathrm{5}", "5", R),
    (r"\text{five}", "5", W),
    (r"(5)", "5", R),
    (r"\left(5\right)", "5", R),
    (r"\displaystyle 5", "5", R),
    (r"5\!", "5", R),
    ("A", "A", R),
    ("(A)", "A", R),
    (r"\text{(A)}", "A", R),
    ("A", "(A)", R),
    (r"\text{A}", "A", R),
    ("B", "A", W),
    ("(B)", "A", W),
    ("A, B", "A", W),
    ("AB", "A", W),
    ("paris", "Paris", R),
    (r"\text{Paris}", "Paris", R),
    ("Paris.", "Paris", R),
    ("Paris, London", "Paris", W),
    ("London", "Paris", W),
    ("not Paris", "Paris", W),
    ("yes", "Yes", R),
    (r"\textbf{Yes}", "Yes", R),
    ("no", "Yes", W),
    ("even", "odd", W),
]
EQUATIONS = [
    ("6=5", "5", W),
    ("5=5", "5", W),
    ("x=5", "5", R),  # what x is
    ("5=x", "5", W),
    ("5", "x=5", R),
    ("x=5", "x = 5", R),
    ("5 = x", "x = 5", R),
    ("x=6", "x=5", W),
    ("y=5", "x=5", W),
    ("y=2x+1", "y = 1 + 2x", R),
    ("y=2x+1", "y=2x-1", W),
    ("x=5=5", "x=5", W),
    ("3+2=5", "x=5", W),
    ("5=5", "x=5", W),
    (r"x \leq 5", "x<=5", R),
    (r"5 \geq x", r"x \le 5", R),
    ("x<5", r"x \leq 5", W),
    ("x<5", "x>5", W),
    ("x<5", "5", W),
    ("1<x<5", r"1 < x < 5", R),
    (r"\neq 5", "5", W),
]
COLLECTIONS = [
    ("[5,5]", "5", W),
    ("{5}", "5", W),  # braces without a backslash are a set, as people write it
    ("{2, 1}", r"\{1, 2\}", R),
    (r"\{5\}", "5", W),
    ("[5]", "5", W),
    ("(5,5)", "5", W),
    ("5,5", "5", W),
    ("5, 6", "5", W),
    ("5;6", "5", W),
    (r"\pm 5", "5", W),
    (r"\pm 5", "5, -5", R),
    (r"5 \text{ or } 6", "6", W),
    (r"5 \text{ or } 6", "5, 6", R),
    (r"5 \text{ and } 6", "5, 6", R),
    ("2, 1", "1, 2", R),
    ("1, 3", "1, 2", W),
    ("1", "1, 2", W),
    ("1, 2, 3", "1, 2", W),
    (r"\{1, 2\}", r"\{2, 1\}", R),
    (r"\{1, 2\}", "1, 2", R),
    (r"\{1, 2, 3\}", r"\{1, 2\}", W),
    (r"\emptyset", r"\emptyset", R),
    (r"\varnothing", r"\emptyset", R),
    (r"\{\}", r"\{1\}", W),
    ("(1, 2)", "(1,2)", R),
    ("(2, 1)", "(1,2)", W),
    ("(1,2,3)", "(1,2)", W),
    ("[1,2]", "(1,2)", W),
    ("(1,2]", "(1,2)", W),
    ("(1,2)", r"\{1,2\}", W),
    ("(0.5, 2)", r"(\frac{1}{2}, 2)", R),
    (r"\left(1, 2\right)", "(1,2)", R),
    (r"[1, \infty)", r"[1,\infty)", R),
    (r"(-\infty, 3]", r"(-\infty,3]", R),
    (r"(-\infty, 3)", r"(-\infty,3]", W),
    (r"[3,4] \cup [1,2]", r"[1,2] \cup [3,4]", R),
    (r"[1,2] \cup [2,3]", "[1,3]", R),
    ("[1,3]", r"[1,2] \cup [3,4]", W),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", R),
    (r"\begin{bmatrix}1\\2\end{bmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", R),
    (r"\begin{pmatrix}1 & 2\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", W),
]
EXPRESSIONS = [
    (r"\sqrt{8}", r"2\sqrt{2}", R),
    ("sqrt(2)", r"\sqrt{2}", R),
    (r"\sqrt2", r"\sqrt{2}", R),
    (r"\frac{1}{\sqrt{2}}", r"\frac{\sqrt{2}}{2}", R),
    ("1.41421356", r"\sqrt{2}", W),
    (r"\sqrt{3}", r"\sqrt{2}", W),
    (r"\sqrt[3]{8}", "2", R),
    (r"2\pi", r"2 \pi", R),
    (r"\frac{\pi}{2}", r"\pi/2", R),
    ("6.283185", r"2\pi", W),
    ("6.28", r"2\pi", W),
    ("3.14159265358979", r"\pi", W),
    (r"\pi", r"2\pi", W),
    ("2pi", r"2\pi", R),
    ("2π", r"2\pi", R),
    (r"\pi", "3.14159265358979", W),
    (r"\sqrt{2}", "1.4142135623730951", W),
    (r"\sqrt{4}", "2", R),
    ("√2", "5", W),
    ("x(x+1)", "x^2+x", R),
    ("x**2 + x", "x^2+x", R),
    ("(x+1)^2", "x^2+2x+1", R),
    ("x^2+1", "x^2+x", W),
    ("x", "y", W),
    ("5x", "5", W),
    ("x+5", "5", W),
    (r"\frac{1}{x}", "x^{-1}", R),
    ("a+b", "b+a", R),
    ("a-b", "b-a", W),
    ("2+3i", "3i+2", R),
    ("2-3i", "2+3i", W),
    ("5!", "120", R),
    (r"\binom{5}{2}", "10", R),
    (r"\log_2 8", "3", R),
    ("e^{2}", "e^2", R),
    ("2^{10}", "1024", R),
    ("2^{1/2}", r"\sqrt{2}", R),
    (r"\sin^2 x + \cos^2 x", "1", R),
    ("0^0", "1", W),
    ("(1-1)^0", "1", W),
    (r"\frac{0}{0}", "0", W),
    ("3+4", "7", R),
    ("= 7", "7", W),
    ("5 6", "11", W),
    ("5 6", "56", W),
    (r"5 \quad 6", "30", W),
    (r"5\;6", "30", W),
]
VERDICTS = NUMBERS + FRACTIONS + PERCENTS_AND_UNITS + WRAPPERS + EQUATIONS + COLLECTIONS + EXPRESSIONS


@pytest.fixture(scope="module")
def reward() -> Iterator[MathReward]:
    made = MathReward(MathOptions(evaluated_only=False, timeout_seconds=10.0))
    yield made
    made.close()


def test_the_table_of_verdicts_holds(reward: MathReward, make_rollout: Callable[..., Rollout]) -> None:
    assert len(VERDICTS) >= 150
    scores = reward([make_rollout(rf"So \boxed{{{answer}}}.", reference) for answer, reference, _ in VERDICTS])
    unscored = [(row, score.error) for row, score in zip(VERDICTS, scores, strict=True) if score.value is None]
    assert unscored == []
    assert [row for row, score in zip(VERDICTS, scores, strict=True) if score.value != row[2]] == []


NUMBERS_AS_PEOPLE_WRITE_THEM = st.one_of(
    st.integers(-(10**9), 10**9).map(Fraction),
    st.fractions(max_denominator=999),
    st.decimals(-1000, 1000, places=3).map(Fraction),
)


def variants(value: Fraction | int) -> list[str]:
    """One number in the ways of writing it that the grader reads."""
    sign, size = "-" if value < 0 else "", abs(value)
    above, below = size.numerator, size.denominator
    written = [f"{sign}{above}/{below}", f"{sign}\\frac{{{above}}}{{{below}}}", f"${value}$", f"**{value}**."]
    if below == 1:
        value = int(value)
        written += [f"{value}", f"{value}.0", f"{value:,}", rf"{value} \text{{ apples}}", f"{value} dollars"]
        written += [f"{value:,}".replace(",", "{,}"), f"{sign}${size}", rf"{value}^\circ"]
    elif above > below:
        written += [f"{sign}{above // below} {above % below}/{below}"]
    return written


@given(NUMBERS_AS_PEOPLE_WRITE_THEM)
def test_every_way_of_writing_a_number_answers_it(value: Fraction) -> None:
    assert {
        text: compare_exact(clean(text), str(value), evaluated_only=False) for text in variants(value)
    } == dict.fromkeys(variants(value), True)


@given(NUMBERS_AS_PEOPLE_WRITE_THEM, NUMBERS_AS_PEOPLE_WRITE_THEM)
def test_no_way_of_writing_another_number_answers_it(value: Fraction, other: Fraction) -> None:
    if value != other:
        assert {compare_exact(clean(text), str(value), evaluated_only=False) for text in variants(other)} == {False}


@given(st.text(alphabet="0123456789./%\\{}()[]=+-*^ xfractext,°π", max_size=40))
def test_any_answer_is_decided_or_left_to_symbols_without_an_exception(answer: str) -> None:
    assert compare_exact(clean(with_percent_sign(answer)), "1/2", evaluated_only=False) in (True, False, None)


@pytest.mark.parametrize("piece", ["5 ", "a", "\\text{ percent", "1 1/", "5}", "\\,", "^", "~"])
def test_reading_a_quantity_is_quick_for_any_answer(piece: str) -> None:
    with within_seconds():
        compare_exact(with_percent_sign(piece * (1_400 // len(piece))), "5", evaluated_only=False)
        with_percent_sign(piece * 100_000)  # a whole completion may be the answer


def test_of_several_boxes_the_last_counts(reward: MathReward, make_rollout: Callable[..., Rollout]) -> None:
    texts = [r"\boxed{4} no, \boxed{5}", r"\boxed{5} no, \boxed{4}", r"\boxed{5} \boxed{}", r"\boxed{5} or 4"]
    assert [score.value for score in reward([make_rollout(text, "5") for text in texts])] == [1.0, 0.0, 0.0, 1.0]


def test_a_mixed_number_in_running_text_is_read_whole(make_rollout: Callable[..., Rollout]) -> None:
    scores = MathReward()([make_rollout("It takes 1 1/2 hours.", reference) for reference in ("3/2", "1/2")])
    assert [score.value for score in scores] == [1.0, 0.0]

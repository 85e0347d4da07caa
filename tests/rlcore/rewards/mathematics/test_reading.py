"""Reading a completion: the last marker counts, thinking does not, numbers are exact, and time is linear."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcore.rewards.answers import (
    brace_depth,
    clean,
    extract_stated,
    final_part,
    find_answer,
    last_marked_answer,
    last_number,
    marked_answers,
    required_prefix,
)
from rlcore.rewards.math_answer import compare_exact
from rlcore.rewards.units import parse_number, with_percent_sign
from rlcore.types import Rollout
from tests.quick import within_seconds
from tests.rlcore.rewards.conftest import make_rollout
from tests.rows import rows_of

READERS: dict[str, Callable[[str], Any]] = {
    "last_marked_answer": last_marked_answer, "final_part": final_part, "last_number": last_number, "clean": clean,
    "extract_stated": extract_stated, "brace_depth": brace_depth,
    "parse_number": lambda text: None if (number := parse_number(text)) is None else str(number.value),
    "is_evaluated": lambda text: getattr(parse_number(text), "is_evaluated", None),
}  # fmt: skip
PIECES = ["\\boxed{", "\\box{", "{", "}", "\\{", "\\", "####", "\n", "<answer>", "</answer>", "5", "x", " ", "$"]

ENDLESS = [
    *("\\boxed{", "<answer>", "#### \n", "9", "9,", "- ", "\\frac{1}{", "1,", "{,}", "1e", "/", "a ", "is ", "*", "a,"),
    *("x = ", "the answer is ", "-", "'", "not", "1+", "(", "1=", "9*", "1,000"),
]
messy_texts = st.lists(st.sampled_from(PIECES), max_size=40).map("".join)


@pytest.mark.parametrize("reader", READERS)
def test_a_text_is_read_exactly(reader: str) -> None:
    rows = [row for row in rows_of(__file__, "reading") if row["reader"] == reader]
    found = [(row["text"], READERS[reader](row["text"])) for row in rows]
    assert rows
    assert found == [(row["text"], row["read"]) for row in rows]


@pytest.mark.parametrize("reader", READERS)
def test_reading_is_quick_for_any_text(reader: str) -> None:
    with within_seconds():
        for piece in ENDLESS:
            READERS[reader](piece * (100_000 // len(piece)))
        READERS[reader]("\\boxed{" * 20_000 + "5" + "}" * 20_000)


@pytest.mark.parametrize(
    "piece", ["5 ", "\\text{ percent", "1 1/", "5}", "\\,", "a ", "is ", "x = ", "the answer is ", "'"]
)
def test_comparing_is_quick_for_any_answer(piece: str) -> None:
    with within_seconds():
        compare_exact(with_percent_sign(piece * (1_400 // len(piece))), "5", evaluated_only=False)
        with_percent_sign(piece * 100_000)  # a whole completion may be the answer


@pytest.mark.parametrize("text", [r"so \boxed{5}", "#### 5", "it is 5", "<answer>5</answer> and then", ""])
def test_where_the_template_begins_the_thinking_nothing_before_its_end_is_an_answer(text: str) -> None:
    prefill = "<think>\n"
    assert find_answer(make_rollout(text), last_number_counts=True, prefill=prefill) is None
    ended = make_rollout(f"{text}{required_prefix(prefill)} It is \\boxed{{7}}.")
    assert find_answer(ended, last_number_counts=True, prefill=prefill) == "7"
    again = make_rollout(f"{text}</think> <think> \\boxed{{7}}")
    assert find_answer(again, last_number_counts=True, prefill=prefill) is None
    assert required_prefix("") == ""


def test_a_cut_completion_has_no_last_number() -> None:
    """The 12 of a cut "1234" is half a number."""
    whole: Rollout = make_rollout("so it is 12")
    cut: Rollout = make_rollout("so it is 12", finish_reason="length")
    assert find_answer(whole, last_number_counts=True) == "12"
    assert find_answer(whole, last_number_counts=False) is None
    assert find_answer(cut, last_number_counts=True) is None


def test_a_cut_completion_keeps_its_marked_answer() -> None:
    assert find_answer(make_rollout(r"\boxed{12} and", finish_reason="length"), last_number_counts=True) == "12"


@given(messy_texts)
def test_a_box_that_is_found_is_balanced_and_lies_in_the_text(text: str) -> None:
    for marked in marked_answers(text):
        assert marked.start < marked.inner[0] <= marked.inner[1] <= marked.end <= len(text)
        if marked.kind == "box":
            inside = text[slice(*marked.inner)]
            # Take the escaped characters out, then closing braces never outnumber opening ones.
            bare = inside.replace("\\\\", "").replace("\\{", "").replace("\\}", "")
            depths = [bare[:i].count("{") - bare[:i].count("}") for i in range(len(bare) + 1)]
            assert min(depths) >= 0 and depths[-1] == 0


@given(messy_texts.filter(lambda text: "<answer>" not in text), st.integers(0, 99))
def test_a_last_line_of_hashes_wins_over_all_before_it(text: str, number: int) -> None:
    assert last_marked_answer(f"{text}\n#### {number}") == str(number)


def test_a_percentage_equals_neither_its_number_nor_its_share() -> None:
    percent = parse_number(r"50\%")
    assert percent == parse_number("50 %") == parse_number("100/2%")
    assert percent != parse_number("50")
    assert percent != parse_number("0.5")


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

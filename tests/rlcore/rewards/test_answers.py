"""Finding the answer of a completion: the last marker counts, thinking does not, and time is linear."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcore.rewards.answers import (
    brace_depth,
    clean,
    final_part,
    find_answer,
    last_marked_answer,
    last_number,
    marked_answers,
    required_prefix,
)
from rlcore.types import Rollout
from tests.quick import within_seconds

PIECES = ["\\boxed{", "\\box{", "{", "}", "\\{", "\\", "####", "\n", "<answer>", "</answer>", "5", "x", " ", "$"]
messy_texts = st.lists(st.sampled_from(PIECES), max_size=40).map("".join)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"The answer is \box{1.1}.", "1.1"),
        (r"\boxed{1} or rather \boxed{2}", "2"),
        (r"\fbox{7}", "7"),
        ("so\n#### 72\n", "72"),
        ("  #### -3 apples", "-3 apples"),
        ("<answer> 5 </answer>", "5"),
        ("<answer>\n1 2\n3 4\n</answer>", "1 2\n3 4"),
        (r"<answer>\boxed{$5$}</answer>", "$5$"),
        (r"#### the answer is \boxed{5}", "5"),
        (r"\boxed{\boxed{5}}", "5"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{1 and then \boxed{5}", "5"),
        (r"\boxed{3 + \boxed{4}}", r"3 + \boxed{4}"),
        ("<answer>1</answer> no: \\boxed{2} no:\n#### 3", "3"),
        ("#### 3\n\\boxed{2}", "2"),
        ("", None),
        ("the answer is 5", None),
        (r"\boxed{5", None),
        (r"\boxed{\}", None),
        ("<answer>5", None),
        ("5</answer>", None),
        ("##### 5", None),
        ("text #### 5", None),
    ],
)
def test_the_marker_that_ends_last_gives_the_answer(text: str, answer: str | None) -> None:
    assert last_marked_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("plain", "plain"),
        ("<think>a</think>b", "b"),
        ("a</think>b", "b"),  # the template has written <think> into the prompt
        ("<think>a</think>b<think>c</think>d", "d"),
        ("<think>\\boxed{5} still thinking", None),
        ("a</think>b<think>c", None),
    ],
)
def test_only_what_follows_the_thinking_counts(text: str, part: str | None) -> None:
    assert final_part(text) == part


@pytest.mark.parametrize("text", [r"so \boxed{5}", "#### 5", "it is 5", "<answer>5</answer> and then", ""])
def test_where_the_template_begins_the_thinking_nothing_before_its_end_is_an_answer(
    make_rollout: Callable[..., Rollout], text: str
) -> None:
    prefill = "<think>\n"
    assert find_answer(make_rollout(text), last_number_counts=True, prefill=prefill) is None
    ended = make_rollout(f"{text}{required_prefix(prefill)} It is \\boxed{{7}}.")
    assert find_answer(ended, last_number_counts=True, prefill=prefill) == "7"
    again = make_rollout(f"{text}</think> <think> \\boxed{{7}}")
    assert find_answer(again, last_number_counts=True, prefill=prefill) is None
    assert required_prefix("") == ""


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("= 5*7 = 35", "35"),
        ("it is -3.", "-3"),
        ("5 - 3", "5 - 3"),
        ("5-3", "5-3"),
        ("(5) - 3", "(5) - 3"),
        ("costs $18.", "18"),
        ("one half, 1/2", "1/2"),
        (r"so \frac{1}{2}", r"\frac{1}{2}"),
        (r"so -\frac{1}{2}.", r"-\frac{1}{2}"),
        ("up by 12%", "12%"),
        ("1,234,567 people", "1,234,567"),
        ("1,2,3", "1,2,3"),
        ("0.5 and .25", "0.5, .25"),
        ("10^{5}", "10^{5}"),
        ("x2", None),
        ("no number", None),
        ("٣", None),  # only ASCII digits are digits
    ],
)
def test_the_last_number_of_running_text(text: str, number: str | None) -> None:
    assert last_number(text) == number


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        (" $5$. ", "5"),
        ("**$5$.**", "5"),
        (r"\( x \)", "x"),
        (r"\[ x \]", "x"),
        ("`a`", "a"),
        ("$5$ and $6$", "5$ and $6"),
        ("1, 2, ...", "1, 2, ..."),
        ("$", "$"),
        ("[1, 2]", "[1, 2]"),
    ],
)
def test_delimiters_around_the_whole_answer_are_stripped(text: str, cleaned: str) -> None:
    assert clean(text) == cleaned


def test_a_cut_completion_has_no_last_number(make_rollout: Callable[..., Rollout]) -> None:
    """The 12 of a cut "1234" is half a number."""
    whole: Rollout = make_rollout("so it is 12")
    cut: Rollout = make_rollout("so it is 12", finish_reason="length")
    assert find_answer(whole, last_number_counts=True) == "12"
    assert find_answer(whole, last_number_counts=False) is None
    assert find_answer(cut, last_number_counts=True) is None


def test_a_cut_completion_keeps_its_marked_answer(make_rollout: Callable[..., Rollout]) -> None:
    assert find_answer(make_rollout(r"\boxed{12} and", finish_reason="length"), last_number_counts=True) == "12"


def test_brace_depth_counts_the_deepest_nesting() -> None:
    assert brace_depth("a{b[c(d)]}{e}") == 3
    assert brace_depth("}}}{") == 1


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


@pytest.mark.parametrize(
    "text",
    [
        "\\boxed{" * 30_000,
        "\\boxed{" * 30_000 + "5" + "}" * 30_000,
        "<answer>" * 30_000,
        "#### \n" * 30_000,
        "9" * 200_000,
        "9," * 100_000,
        "- " * 100_000,
        "\\frac{1}{" * 30_000,
    ],
    ids=lambda text: text[:10],
)
def test_reading_is_quick_for_any_text(text: str) -> None:
    with within_seconds():
        last_marked_answer(text)
        last_number(text)

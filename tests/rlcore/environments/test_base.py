from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcore.environments.base import CLOSING, OPENING, ParsedCall, parse_call


@pytest.mark.parametrize(
    ("turn", "tool", "argument"),
    [
        ("<tool:calculator>3+4</tool>", "calculator", "3+4"),
        ("Let me see.\n<tool:search> who was it? </tool>\n", "search", "who was it?"),
        ("<tool:python>\nprint('<b>' < 'c')\n</tool>", "python", "print('<b>' < 'c')"),
        ("<tool:calculator></tool>", "calculator", ""),
    ],
)
def test_a_turn_that_ends_in_a_call_is_one(turn: str, tool: str, argument: str) -> None:
    assert parse_call(turn) == ParsedCall(tool=tool, argument=argument)


@pytest.mark.parametrize("turn", ["", "#### 7", "<tool:calculator>3+4", "<tool:calculator>3+4</tool> is 7", "</tools>"])
def test_a_turn_that_does_not_end_in_a_call_is_an_answer(turn: str) -> None:
    assert parse_call(turn) is None


@pytest.mark.parametrize(
    "turn",
    [
        "</tool>", "3+4</tool>", "<tool:>3+4</tool>", "<tool: calculator>3+4</tool>",
        "<tool:a>1</tool><tool:b>2</tool>", "<tool:a><tool:b>2</tool>", "<tool:a>1</tool></tool>",
    ],
)  # fmt: skip
def test_a_malformed_call_names_its_fault(turn: str) -> None:
    parsed = parse_call(turn)
    assert parsed is not None
    assert parsed.tool == ""
    assert "one call" in parsed.error


@given(tool=st.from_regex(r"[a-z_]{1,40}", fullmatch=True), argument=st.text(), before=st.text())
def test_what_is_written_is_read(tool: str, argument: str, before: str) -> None:
    if CLOSING in argument + before or OPENING.search(argument + before):
        return
    assert parse_call(f"{before}<tool:{tool}>{argument}</tool>") == ParsedCall(tool=tool, argument=argument.strip())

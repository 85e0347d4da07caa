"""A sampled turn as the agent sees it."""

from __future__ import annotations

import json

import pytest

from rlcore.agents.wire.replies import ReplyReader, first_stop
from rlcore.environments.call_formats import FORMATS
from tests.rlcore.agents.gateways import ADD

TOOLS = json.dumps([ADD])
HERMES = '<tool_call>{"name": "add", "arguments": {"a": 3, "b": 4}}</tool_call>'
LLAMA = '{"name": "add", "parameters": {"a": 3, "b": 4}}'
MISTRAL = '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 3, "b": 4}, "id": "abcdefghi"}]'
OURS = '<tool:add>{"a": 3, "b": 4}</tool>'


def read(text: str, form: str = "hermes", *, tools: str = TOOLS, prefill: str = "") -> tuple[str, str, list[str], bool]:
    """Thought, content, arguments of the calls, and whether one is malformed."""
    reader = ReplyReader(form=FORMATS[form], prefill=prefill)
    turn, is_unparsed = reader.read(text, text, prompt="", tools=tools, seed="0")
    return turn.thought, turn.content, [call.arguments for call in turn.calls], is_unparsed


@pytest.mark.parametrize(
    ("form", "text"), [("hermes", HERMES), ("llama3", LLAMA), ("mistral", MISTRAL), ("ours", OURS)]
)
def test_a_call_of_each_format_is_read(form: str, text: str) -> None:
    assert read(text, form) == ("", "", ['{"a": 3, "b": 4}'], False)
    assert read(text, form, tools="") == ("", text, [], False)  # an agent without tools


@pytest.mark.parametrize(
    ("form", "text", "count"),
    [
        ("hermes", f"First:\n{HERMES}\n{HERMES}", 2),
        ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {}}, {"name": "f", "arguments": {}}]', 2),
        ("ours", f"First: {OURS}", 1),
    ],
)
def test_several_calls_and_the_text_before_them_are_read(form: str, text: str, count: int) -> None:
    _, content, calls, is_unparsed = read(text, form)
    assert (content, len(calls), is_unparsed) == ("" if form == "mistral" else "First:", count, False)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", '<tool_call>{"name": "add"'),
        ("hermes", f"{HERMES}<tool_call>{{}}</tool_call>"),
        ("hermes", '<tool_call>{"name": "add", "arguments": "3"}</tool_call>'),
        ("mistral", "[TOOL_CALLS] add 3 4"),
        ("ours", "<tool:add>3</tool>"),
        ("ours", "<tool:add>3</tool></tool>"),
    ],
)
def test_a_malformed_call_is_content_and_counted(form: str, text: str) -> None:
    assert read(text, form) == ("", text, [], True)


@pytest.mark.parametrize(
    ("text", "prefill", "thought", "content"),
    [
        ("<think>\nAdd.\n</think>\n\n7", "", "Add.", "7"),
        ("Add.\n</think>\n\n7", "<think>\n", "Add.", "7"),
        ("Add.", "<think>\n", "Add.", ""),
        ("7 <think>x</think>", "", "", "7 <think>x</think>"),
        (f"<think>maybe {HERMES}</think>4", "", f"maybe {HERMES}", "4"),
    ],
)
def test_a_thought_is_apart_and_holds_no_call(text: str, prefill: str, thought: str, content: str) -> None:
    assert read(text, prefill=prefill) == (thought, content, [], False)


def test_calls_have_ids_of_nine_characters_that_differ() -> None:
    turns = [
        ReplyReader(form=FORMATS["hermes"]).read(HERMES * 2, HERMES * 2, prompt="", tools=TOOLS, seed=seed)[0]
        for seed in "ab"
    ]
    ids = [call.call_id for turn in turns for call in turn.calls]
    assert len(set(ids)) == 4 and {len(each) for each in ids} == {9}


def test_the_first_of_several_stop_strings_counts() -> None:
    assert first_stop("one two three", ["three", "two"]) == 4
    assert first_stop("one", ["two"]) is None

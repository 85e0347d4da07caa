"""Calls as models write them, in each format: known texts, malformed ones, and what is no call."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcore.environments.base import ParsedCall
from rlcore.environments.call_formats import FORMATS, format_of
from tests.quick import within_seconds

GUESS = ParsedCall(tool="guess", arguments={"number": 5})
NAMED = ParsedCall(tool="guess", arguments={"number": 5}, call_id="a1B2c3D4e")


@pytest.mark.parametrize(
    ("form", "turn", "expected"),
    [
        ("hermes", '<tool_call>\n{"name": "guess", "arguments": {"number": 5}}\n</tool_call>', GUESS),
        ("hermes", 'First:\n<tool_call>{"name": "guess", "arguments": {"number": 5}}</tool_call>', GUESS),
        ("hermes", '<think>no <tool_call></think>\n<tool_call>{"name": "stop"}</tool_call>', "stop"),
        ("hermes", "#### 5", None),
        ("hermes", "<think>shall I <tool_call>?</think>\n#### 5", None),
        ("hermes", "<tool_call>{'name': 'guess'}</tool_call>", "fault"),
        ("hermes", '<tool_call>{"name": "guess", "arguments": {"number": 5}}', "fault"),
        ("hermes", '<tool_call>{"name": "guess", "arguments": "5"}</tool_call>', "fault"),
        ("hermes", '<tool_call>{"name": "a"}</tool_call><tool_call>{"name": "b"}</tool_call>', "fault"),
        ("hermes", "<tool_call>" + "[" * 100_000 + "</tool_call>", "fault"),
        ("llama3", '{"name": "guess", "parameters": {"number": 5}}', GUESS),
        ("llama3", '<|python_tag|>{"name": "guess", "parameters": {"number": 5}}', GUESS),
        ("llama3", '{"number": 5}', None),
        ("llama3", "I say 5", None),
        ("llama3", '{"name": "guess", "parameters": {"number": 5}', "fault"),
        ("llama3", "<|python_tag|>guess(5)", "fault"),
        ("mistral", '[TOOL_CALLS] [{"name": "guess", "arguments": {"number": 5}, "id": "a1B2c3D4e"}]', NAMED),
        ("mistral", '[TOOL_CALLS]guess[ARGS]{"number": 5}', GUESS),
        ("mistral", '[TOOL_CALLS]guess{"number": 5}', GUESS),
        ("mistral", "5", None),
        ("mistral", '[TOOL_CALLS] [{"name": "a"}, {"name": "b"}]', "fault"),
        ("mistral", "[TOOL_CALLS]guess[ARGS]{5}", "fault"),
        ("ours", "<tool:guess>5</tool>", ParsedCall(tool="guess", argument="5")),
        ("ours", "5</tool>", "fault"),
        ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>', "fault"),
        ("hermes", '<tool_call>{"name": "a", "arguments": {"word": "\\ud800"}}</tool_call>', "fault"),
        ("ours", "5", None),
        ("hermes", '<tool_call>{"name": "a", "arguments": {"word": NaN}}</tool_call>', "fault"),
        ("mistral", '[TOOL_CALLS]a{"word": 1e999}', "fault"),
        ("llama3", '{"name": "a", "parameters": {"word": [-Infinity]}}', "fault"),
        ("ours", "<think>use <tool:add>3</tool> then</think>So: <tool:guess>5</tool>", "guess 5"),
        ("ours", "<tool:guess>print('<think>')</tool>", "guess print('<think>')"),
    ],
)
def test_a_turn_is_a_call_a_malformed_call_or_an_answer(
    form: str, turn: str, expected: ParsedCall | str | None
) -> None:
    found = FORMATS[form].parse(turn)
    if form == "ours" and isinstance(expected, str) and expected != "fault":
        name, _, argument = expected.partition(" ")
        assert found == ParsedCall(tool=name, argument=argument)
    elif expected == "fault":
        assert found is not None and found.error and not found.tool
    elif isinstance(expected, str):
        assert found is not None and (found.tool, found.arguments) == (expected, {})
    else:
        assert found == expected


CALLS = {
    "hermes": '<tool_call>{"name": "guess", "arguments": {"number": 5}}</tool_call>',
    "llama3": '{"name": "guess", "parameters": {"number": 5}}',
    "mistral": '[TOOL_CALLS] [{"name": "guess", "arguments": {"number": 5}}]',
    "ours": "<tool:guess>5</tool>",
}


@pytest.mark.parametrize("form", FORMATS)
@given(before=st.text("ab \n", max_size=4), after=st.text("ab <>/\n", max_size=4))
def test_what_a_thought_holds_is_no_call(form: str, before: str, after: str) -> None:
    call = CALLS[form]
    thought = f"<think>{before}{call}{after}"
    assert FORMATS[form].parse(thought) is None  # never ends
    assert FORMATS[form].parse(f"{thought}</think>It is 5.") is None
    for turn in (f"{thought}</think>\n{call}", f"<think>{after}</think><think>{call}</think>{call}"):
        assert FORMATS[form].parse(turn) == FORMATS[form].parse(call)


@pytest.mark.parametrize("form", ["hermes", "llama3", "mistral"])
@pytest.mark.parametrize("text", ["</tool_call>", "<tool_call>", "[TOOL_CALLS]", "</think>", "<think>", '\\"}]}'])
def test_an_argument_may_contain_the_marks_of_a_call(form: str, text: str) -> None:
    found = FORMATS[form].parse(CALLS[form].replace('"number": 5', f'"text": "{text}"'))
    assert found == ParsedCall(tool="guess", arguments={"text": text.replace("\\", "")})


LONG = 200_000


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    "piece",
    [
        *(
            "<tool_call>",
            "<tool_call>{",
            "</tool_call>",
            "<think>",
            "</think>",
            "[TOOL_CALLS]",
            "[TOOL_CALLS][",
            "[ARGS]",
        ),
        *(
            "<tool:a>",
            "</tool>",
            "<tool:",
            "<|python_tag|>",
            "[",
            "{",
            '{"name":',
            '"',
            "\\",
            " ",
            "\n",
            "a",
            "a ",
            "9",
        ),
    ],
)
def test_no_long_turn_takes_more_than_its_length(form: str, piece: str) -> None:
    body = piece * (LONG // len(piece))
    ends = ("", "</tool_call>", "</tool>", "{", "}")
    with within_seconds():
        for start in ("", "<tool_call>", "[TOOL_CALLS]a", "<|python_tag|>", '{"name": "a'):
            for end in ends:
                FORMATS[form].parse(start + body + end)


@given(st.sampled_from(sorted(FORMATS)), st.text(max_size=60), st.text(max_size=60))
def test_no_text_makes_a_parser_raise(form: str, before: str, inside: str) -> None:
    mark = FORMATS[form].mark
    for turn in (before, before + mark + inside, f"{mark}{inside}</tool_call>", f'{{"name"{inside}'):
        found = FORMATS[form].parse(turn)
        assert found is None or bool(found.tool) != bool(found.error) or found.tool == ""


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{% if tools %}<tool_call>{% endif %}", "hermes"), ("Environment: ipython {{ tools }}", "llama3"),
        ("[AVAILABLE_TOOLS]{{ tools }}[TOOL_CALLS]", "mistral"), ("<tool_call>\n<function=name>{{ tools }}", "ours"),
        ("<|im_start|>{{ message.content }}", "ours"),
    ],
)  # fmt: skip
def test_the_format_is_that_of_the_chat_template_unless_one_is_named(template: str, name: str) -> None:
    assert format_of(template).name == name
    assert format_of(template, "mistral").name == "mistral"

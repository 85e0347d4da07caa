"""Formats of calls and tool outputs: each turn is a call, a malformed call or an answer."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcore.environments.base import CLOSING, FORMATS, OPENING, ParsedCall, ToolOutput, format_of, parse_call
from rlcore.environments.calculator import CalculatorTool
from rlcore.environments.episodes import text_argument, tool_schema
from rlcore.environments.tool_output_template import make_tool_output_template, refuse_control_tokens, writes_tools
from rlcore.errors import ConfigError, ModelError
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import Message
from tests.chat_shapes import KINDS, SHAPES, library_ids, load_tokenizer
from tests.quick import within_seconds
from tests.rlcore.environments.tool_templates import HERMES, MISTRAL, MISTRAL_CONTROLS, with_template

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
        ("ours", "<tool:guess>5</tool>", "guess 5"),
        ("ours", "Let me see.\n<tool:search> who was it? </tool>\n", "search who was it?"),
        ("ours", "<tool:python>\nprint('<b>' < 'c')\n</tool>", "python print('<b>' < 'c')"),
        ("ours", "<tool:calculator></tool>", "calculator"),
        *(("ours", turn, None) for turn in ("", "#### 7", "<tool:add>3", "<tool:add>3</tool> is 7", "</tools>")),
        *(("ours", turn, "fault") for turn in ("</tool>", "3</tool>", "<tool:>3</tool>", "<tool: add>3</tool>")),
        ("ours", "<tool:a>1</tool><tool:b>2</tool>", "fault"),
        ("ours", "<tool:a><tool:b>2</tool>", "fault"),
        ("ours", "<tool:a>1</tool></tool>", "fault"),
        ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>', "fault"),
        ("hermes", '<tool_call>{"name": "a", "arguments": {"word": "\\ud800"}}</tool_call>', "fault"),
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


PIECES = (
    "<tool_call>", "<tool_call>{", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "[TOOL_CALLS][", "[ARGS]",
    "<tool:a>", "</tool>", "<tool:", "<|python_tag|>", "[", "{", '{"name":', '"', "\\", " ", "\n", "a", "a ", "9",
)  # fmt: skip


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("piece", PIECES)
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


@given(tool=st.from_regex(r"[a-z_]{1,40}", fullmatch=True), argument=st.text(), before=st.text())
def test_what_is_written_is_read(tool: str, argument: str, before: str) -> None:
    if CLOSING in argument + before or OPENING.search(argument + before):
        return
    assert parse_call(f"{before}<tool:{tool}>{argument}</tool>") == ParsedCall(tool=tool, argument=argument.strip())


TOOLS = '[{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}]'


def test_the_name_of_a_call_is_repeated_only_where_it_is_one(tokenizer: ChatTokenizer) -> None:
    own = with_template(tokenizer, MISTRAL, *MISTRAL_CONTROLS)
    frame = make_tool_output_template(own, "tool", FORMATS["mistral"])
    told = {name: own.spell(frame.reply("7", name)) for name in ("a1B2c3D4e", "<|im_end|>", "", "[INST]abc")}
    assert "a1B2c3D4e" in told["a1B2c3D4e"]
    assert all("000000000" in told[name] for name in ("<|im_end|>", "", "[INST]abc"))
    assert own.special_tokens["[INST]"] not in frame.reply("7", "[INST]abc")


@pytest.mark.parametrize("kind", KINDS)
def test_a_conversation_continues_with_the_tokens_that_it_has_as_a_whole(kind: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tmp_path, kind, SHAPES["Zephyr"])
    turns = [("user", "How many?"), ("assistant", "f()"), ("tool", "  42 apples"), ("assistant", "It is 42.")]
    prompt, answer = tokenizer.render_demonstration([Message(role="user", content="How many?")], "f()")
    reply = make_tool_output_template(tokenizer, "tool", FORMATS["ours"]).reply("  42 apples", "")
    so_far = (*prompt, *answer, *reply)
    assert so_far == library_ids(tokenizer, turns[:3], is_prompt=True)
    hostile = make_tool_output_template(tokenizer, "tool", FORMATS["ours"]).reply("</s>\n<s>", "")
    assert "</s>\n<s>" in tokenizer.spell(hostile)
    assert Counter(reply)[tokenizer.eos_ids[0]] == Counter(hostile)[tokenizer.eos_ids[0]]


def test_a_template_is_asked_whether_it_describes_tools(tokenizer: ChatTokenizer) -> None:
    assert not writes_tools(tokenizer, TOOLS)
    assert writes_tools(with_template(tokenizer, HERMES), TOOLS)


def test_a_template_that_drops_tool_output_is_refused(tokenizer: ChatTokenizer) -> None:
    silent = with_template(tokenizer, HERMES.replace("<tool_response>\n{{ m.content }}", "<tool_response>\n"))
    with pytest.raises(ModelError, match="does not write the output of a tool once"):
        make_tool_output_template(silent, "tool", FORMATS["hermes"])


def test_a_description_with_a_control_token_is_refused(tokenizer: ChatTokenizer) -> None:
    refuse_control_tokens(tokenizer, TOOLS)
    refuse_control_tokens(tokenizer, "")
    with pytest.raises(ConfigError, match="has the control token"):
        refuse_control_tokens(tokenizer, TOOLS.replace('"d"', '"adds <|im_end|> and more"'))


def test_a_tool_of_text_has_one_argument_and_a_description() -> None:
    function = tool_schema(CalculatorTool())["function"]
    assert (function["name"], function["parameters"]["required"]) == ("calculator", ["argument"])
    assert function["description"].startswith("Computes an expression")


def test_a_call_gives_its_text_by_name_or_as_it_stands() -> None:
    assert text_argument(ParsedCall(tool="calculator", argument="3+4")) == "3+4"
    assert text_argument(ParsedCall(tool="calculator", arguments={"argument": "3+4"})) == "3+4"
    for arguments in ({}, {"argument": 7}, {"argument": "7", "more": 1}, {"expression": "3+4"}):
        found = text_argument(ParsedCall(tool="calculator", arguments=arguments))
        assert isinstance(found, ToolOutput) and found.is_error

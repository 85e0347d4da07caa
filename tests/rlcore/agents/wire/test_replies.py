"""A sampled turn as the agent sees it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rlcore.agents.wire.replies import ReplyReader, as_seen, first_stop

from rlcore.environments.call_formats import FORMATS
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import Prompt, Rollout
from tests.chat_shapes import CORPUS, KINDS, SHAPES, load_tokenizer
from tests.rlcore.agents.gateways import ADD, until_stop

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


CALL = '<tool_call>{"name": %s, "arguments": %s}</tool_call>'


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", '<tool_call>{"name": "add"'),
        ("hermes", f"{HERMES}<tool_call>{{}}</tool_call>"),
        ("hermes", CALL % ('"add"', '"3"')),
        ("hermes", CALL % ('"search web"', "{}")),
        ("hermes", CALL % ('""', "{}")),
        ("hermes", CALL % ('"add()"', "{}")),
        ("hermes", CALL % ('"加法"', "{}")),
        ("hermes", CALL % ('"%s"' % ("a" * 129), "{}")),
        ("hermes", CALL % ('"add"', '{"a": NaN}')),
        ("hermes", CALL % ('"add"', '{"a": [-Infinity]}')),
        ("hermes", CALL % ('"add"', '{"a": 1e999}')),
        ("hermes", CALL % ('"add"', '{"a": %s}' % ("9" * 5000))),
        ("hermes", CALL % ('"add"', '{"a": %s}' % ("[" * 70 + "]" * 70))),
        ("llama3", '{"name": "search web", "parameters": {}}'),
        ("llama3", '{"name": "add", "parameters": {}} {"name": "add", "parameters": {}}'),
        ("mistral", "[TOOL_CALLS] add 3 4"),
        ("mistral", '[TOOL_CALLS]add{"a": NaN}'),
        ("mistral", "[TOOL_CALLS] []"),
        ("ours", "<tool:add>3</tool>"),
        ("ours", "<tool:add>3</tool></tool>"),
        ("ours", '<tool:add>{"a": NaN, "b": 4}</tool>'),
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


def test_a_call_ends_where_its_json_ends() -> None:
    text = CALL % ('"add"', '{"a": "</tool_call><think>", "b": 4}')
    assert read(text * 2) == ("", "", ['{"a": "</tool_call><think>", "b": 4}'] * 2, False)
    assert read("[TOOL_CALLS]" + 'add{"a": "[TOOL_CALLS]"}' * 2, "mistral")[3]  # a mark begins each call
    assert len(read('[TOOL_CALLS]add{"a": "[TOOL_CALLS]"}' * 2, "mistral")[2]) == 2


def test_the_first_of_several_stop_strings_counts() -> None:
    assert first_stop("one two three", ["three", "two"]) == 4
    assert first_stop("one", ["two"]) is None


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, ChatTokenizer]:
    folder = tmp_path_factory.mktemp("kinds")
    return {kind: load_tokenizer(folder / str(number), kind, SHAPES["ChatML"]) for number, kind in enumerate(KINDS)}


TEXTS = st.text(max_size=12) | st.sampled_from(
    [*CORPUS, "naïve 漢字<|im_start|>漢字", "🙂🙃", "Observation: 4\nObservation"]
)


def rollout_of(ids: Sequence[int]) -> Rollout:
    return Rollout(
        prompt=Prompt(prompt_id="p", messages=(), token_ids=(1,), reference="", task=""),
        completion_ids=tuple(ids),
        sampler_logprobs=tuple(-float(number) for number in range(len(ids))),
        loss_mask=(True,) * len(ids),
        policy_version=0,
        finish_reason="length",
        text="",
    )


@settings(max_examples=300)
@given(data=st.data(), kind=st.sampled_from(sorted(KINDS)), text=TEXTS, is_ended=st.booleans())
def test_a_sample_ends_with_the_token_that_completes_the_first_stop_string(
    kinds: Mapping[str, ChatTokenizer], data: st.DataObject, kind: str, text: str, is_ended: bool
) -> None:
    """Against a search that reads the tokens one by one, for stop strings within the text, overlapping or absent."""
    own = kinds[kind]
    ids = (*own.encode(text, "template"), *(own.eos_ids[:1] if is_ended else ())) or own.eos_ids[:1]
    places = data.draw(st.lists(st.tuples(st.integers(0, len(text)), st.integers(1, 9)), max_size=3))
    stops = [text[start : start + size] for start, size in places] + data.draw(
        st.lists(st.text(min_size=1), max_size=2)
    )
    made = rollout_of(ids)
    stops = [stop for stop in stops if stop and "\ufffd" not in stop]  # which is no text but half of a character
    assert as_seen(made, stops, own) == until_stop(made, stops, own)


@pytest.mark.parametrize("place", [0, 1])
def test_a_token_that_reaches_over_the_stop_string_is_kept_and_its_text_is_not(
    kinds: Mapping[str, ChatTokenizer], place: int
) -> None:
    own = kinds["byte-level"]
    (token,) = own.encode(" are", "template")
    ids = [*own.encode("x", "template")[:place], token, token]
    seen = as_seen(rollout_of(ids), ["ar"], own)
    assert (seen.completion_ids, seen.text, seen.finish_reason) == (tuple(ids[: place + 1]), "x"[:place] + " ", "stop")

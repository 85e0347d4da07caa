"""A sampled turn as the agent sees it, sent back verbatim; work that a small request asks for is done once."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from rlcore.agents import gateway as gateways
from rlcore.agents import history, session
from rlcore.agents.gateway import Gateway
from rlcore.agents.rendering import PromptRenderer, ReplyReader, as_seen
from rlcore.agents.requests import Turn
from rlcore.agents.session import Limits
from rlcore.environments.base import FORMATS
from rlcore.sampling.base import SamplingParams
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import Prompt, Rollout
from tests.chat_shapes import CORPUS, KINDS, SHAPES, load_tokenizer
from tests.quick import within_seconds
from tests.rlcore.agents.engines import Parrot, RandomSampler, completion
from tests.rlcore.agents.gateways import ADD, answered_by, chat, running, until_stop, user, with_response_template
from tests.rlcore.environments import tool_templates as templates
from tests.rlcore.environments.tool_templates import with_template

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
        ("hermes", f"{HERMES}<tool_call>{{}}</tool_call>"), ("hermes", CALL % ('"add"', '"3"')),
        ("hermes", CALL % ('"search web"', "{}")),
        ("hermes", CALL % ('""', "{}")), ("hermes", CALL % ('"add()"', "{}")), ("hermes", CALL % ('"加法"', "{}")),
        ("hermes", CALL % ('"%s"' % ("a" * 129), "{}")), ("hermes", CALL % ('"add"', '{"a": NaN}')),
        ("hermes", CALL % ('"add"', '{"a": [-Infinity]}')), ("hermes", CALL % ('"add"', '{"a": 1e999}')),
        ("hermes", CALL % ('"add"', '{"a": %s}' % ("9" * 5000))),
        ("hermes", CALL % ('"add"', '{"a": %s}' % ("[" * 70 + "]" * 70))),
        ("llama3", '{"name": "search web", "parameters": {}}'),
        ("llama3", '{"name": "add", "parameters": {}} {"name": "add", "parameters": {}}'),
        ("mistral", "[TOOL_CALLS] add 3 4"), ("mistral", '[TOOL_CALLS]add{"a": NaN}'), ("mistral", "[TOOL_CALLS] []"),
        ("ours", "<tool:add>3</tool>"), ("ours", "<tool:add>3</tool></tool>"),
        ("ours", '<tool:add>{"a": NaN, "b": 4}</tool>'),
    ],
)  # fmt: skip
def test_a_malformed_call_is_content_and_counted(form: str, text: str) -> None:
    assert read(text, form) == ("", text, [], True)


@pytest.mark.parametrize(
    ("text", "prefill", "thought", "content"),
    [
        ("<think>\nAdd.\n</think>\n\n7", "", "Add.", "7"), ("Add.\n</think>\n\n7", "<think>\n", "Add.", "7"),
        ("Add.", "<think>\n", "Add.", ""), ("7 <think>x</think>", "", "", "7 <think>x</think>"),
        (f"<think>maybe {HERMES}</think>4", "", f"maybe {HERMES}", "4"),
    ],
)  # fmt: skip
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


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, ChatTokenizer]:
    folder = tmp_path_factory.mktemp("kinds")
    return {kind: load_tokenizer(folder / str(number), kind, SHAPES["ChatML"]) for number, kind in enumerate(KINDS)}


TEXTS = st.text(max_size=12) | st.sampled_from(
    [*CORPUS, "naïve 漢字<|im_start|>漢字", "🙂🙃", "Observation: 4\nObservation"]
)


def rollout_of(ids: Sequence[int]) -> Rollout:
    prompt = Prompt(prompt_id="p", messages=(), token_ids=(1,), reference="", task="")
    return completion(prompt, ids, "", logprobs=[-float(number) for number in range(len(ids))], is_cut=True)


@settings(max_examples=100)
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


ROOM = Limits(max_calls=24, max_new_tokens=100_000, max_tokens=200_000)

NAMES = ["add", "search web", "", "add()", "加法", "a" * 129, "a.b/c-d:e", "add\n", 7, None]

NUMBERS = [
    "3", '"x"', "NaN", "-Infinity", "1e999", "1e22", "9" * 400, "9" * 5000, "[" * 70 + "]" * 70, r'"\ud800"', "é",
]  # fmt: skip

OBJECTS = ["{}", "[]", "3", '"{}"', '{"a": {"b": [1.0]}}', *(f'{{"a": {value}, "b": 4}}' for value in NUMBERS)]

MARKS = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<think>", "</think>", "</tool>", "<call>", "\n", " "]

FORMS = ["hermes", "llama3", "mistral", "ours", "response template"]


@st.composite
def calls(draw: st.DrawFn) -> str:
    name, arguments = draw(st.sampled_from(NAMES)), draw(st.sampled_from(OBJECTS))
    call = f'{{"name": {json.dumps(name)}, "arguments": {arguments}}}'
    forms = (
        f"<tool_call>{call}</tool_call>",
        call.replace('"arguments"', '"parameters"'),
        f"[TOOL_CALLS] [{call}, {call}]",
        f"[TOOL_CALLS]{name}{arguments}",
        f"<tool:{name}>{arguments}</tool>",
        f"<call>{call}</call>",
    )
    return draw(st.sampled_from(forms))


SAID = st.lists(calls() | st.sampled_from(MARKS) | st.text(max_size=6), max_size=5).map("".join)


class Saying(Parrot):
    """An engine that writes the same turn again and again, with the control tokens in it."""

    def __init__(self, tokenizer: ChatTokenizer, turn: str) -> None:
        super().__init__(tokenizer)
        self._turn = turn

    def _answered(self, prompt: Prompt, place: int, params: SamplingParams) -> Rollout:
        ids = (*self._tokenizer.encode(self._turn, "template"), *self._tokenizer.end_of_turn)
        return completion(prompt, ids, "", is_cut=False)


@pytest.fixture(scope="module")
def tokenizers(tokenizer: ChatTokenizer) -> Mapping[str, ChatTokenizer]:
    return {
        "hermes": with_template(tokenizer, templates.HERMES),
        "llama3": with_template(tokenizer, templates.LLAMA3),
        "mistral": with_template(tokenizer, templates.MISTRAL, *templates.MISTRAL_CONTROLS),
        "ours": tokenizer,
        "response template": with_response_template(tokenizer),
    }


def sent_back(reply: Mapping[str, Any], *, is_chat: bool) -> list[dict[str, Any]]:
    """The items of a reply as an agent appends them, each call with an output."""
    if is_chat:
        message = reply["choices"][0]["message"]
        ids = [call["id"] for call in message.get("tool_calls", ())]
        return [message, *({"role": "tool", "tool_call_id": each, "content": "7"} for each in ids)]
    ids = [item["call_id"] for item in reply["output"] if item["type"] == "function_call"]
    outputs = ({"type": "function_call_output", "call_id": each, "output": "7"} for each in ids)
    return [*reply["output"], *outputs]


def play(own: ChatTokenizer, prompt: Prompt, turn: str, *, is_chat: bool) -> list[tuple[int | None, str]]:
    """The parents and forks of an answer, and of the answer to the history with it."""
    engine = Saying(own, turn)
    gateway = Gateway(engine, own, ROOM, temperature=1.0, seed=0)
    session = gateway.open(prompt, place=0, sample=0)
    tools, field = ([ADD], "messages") if is_chat else ([{"type": "function"} | ADD["function"]], "input")

    def answered(*history: Any) -> Any:
        asked = json.dumps({field: history, "tools": tools}).encode()
        return json.loads(json.dumps(answered_by(session, engine, asked, is_chat=is_chat)[0]))

    answered(user("3+4"), *sent_back(answered(user("3+4")), is_chat=is_chat), user("So?"))
    return [(call.parent, call.fork) for call in gateway.close(session).calls]


@settings(max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(form="hermes", turn='<tool_call>{"name": "search web", "arguments": {}}</tool_call>', is_chat=True)
@example(form="hermes", turn='<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', is_chat=False)
@given(form=st.sampled_from(FORMS), turn=SAID, is_chat=st.booleans())
def test_any_sampled_text_sent_back_continues_its_answer(
    tokenizers: Mapping[str, ChatTokenizer], prompts: list[Prompt], form: str, turn: str, is_chat: bool
) -> None:
    own = tokenizers[form]
    for control in own.special_tokens:
        if control not in MARKS:
            turn = turn.replace(control, "")
    assert play(own, prompts[0], turn, is_chat=is_chat) == [(None, ""), (1, "")]


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, str], Counter[str]]:
    def watch(module: Any, name: str) -> Counter[str]:
        calls, function = Counter[str](), getattr(module, name)

        def counted(*args: Any, **fields: Any) -> Any:
            calls[hashlib.sha256(repr(args).encode()).hexdigest()] += 1
            return function(*args, **fields)

        monkeypatch.setattr(module, name, counted)
        return calls

    return watch


def test_answers_and_later_requests_read_the_conversation_no_further_time(
    tokenizer: ChatTokenizer, prompts: list[Prompt], count: Callable[[Any, str], Counter[str]]
) -> None:
    digests, prompt, turns = count(json, "loads"), count(session, "_digest"), count(history, "_canonical")
    with running(RandomSampler(tokenizer), tokenizer) as gateway:
        agent = gateway.open(prompts[0], place=0, sample=0)
        first = [user(f"{number}") for number in range(30)]
        assert chat(gateway, agent, *first, n=20, max_tokens=3, tools=[ADD]).status == 200
        assert sum(prompt.values()) == 1
        assert sum(turns.values()) <= 30 + 2 * 20
        assert digests.most_common(1)[0][1] <= 4  # the tools
        assert chat(gateway, agent, *first, n=1, max_tokens=3, tools=[ADD]).status == 200
        assert sum(turns.values()) <= 2 * 30 + 3 * 21


def test_a_repeated_request_gets_the_bytes_that_were_written_first(
    tokenizer: ChatTokenizer, prompts: list[Prompt], count: Callable[[Any, str], Counter[str]]
) -> None:
    written = count(session.Session, "written"), count(gateways, "JSONResponse")
    with running(RandomSampler(tokenizer), tokenizer) as gateway:
        agent = gateway.open(prompts[0], place=0, sample=0)
        replies = [chat(gateway, agent, user("1"), logprobs=True, n=4, retry=number) for number in range(4)]
    assert all(each.body == replies[0].body for each in replies)
    assert [sum(each.values()) for each in written] == [1, 1]


def test_a_stop_string_after_many_broken_characters_is_found_at_once(tokenizer: ChatTokenizer) -> None:
    broken = next(each for each in range(tokenizer.vocabulary_size) if tokenizer.decode([each]) == "\ufffd")
    ids = (*[broken] * 8000, *tokenizer.encode("xyz"))
    with within_seconds():
        seen = as_seen(rollout_of(ids), ["y"], tokenizer)
    assert seen.completion_ids == ids[:8002] and seen.text == "\ufffd" * 8000 + "x"


def test_a_prompt_of_many_short_messages_is_written_at_once(tokenizer: ChatTokenizer) -> None:
    renderer = PromptRenderer(tokenizer=tokenizer, max_tokens=10**7)
    turns = [Turn(role="user", content=f"{number} {'x' * 100}") for number in range(8_000)]
    with within_seconds():
        renderer.root(turns, "")

"""Requests of agents: each parameter is read, ignored or refused by name; any JSON in any place is answered or refused.

What all servers refuse alike is in ``tests/rlcore/openai_api``.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlcore.agents.gateway import Gateway
from rlcore.agents.requests import DECIDED_BY_THE_RUN, OFFER, WITHOUT_EFFECT, Stored, read_chat, read_responses
from rlcore.agents.session import Limits, Session
from rlcore.openai_api.requests import ApiError, Json
from rlcore.text.text_parts import PartEncoder
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import Prompt
from tests.quick import within_seconds
from tests.rlcore.agents.engines import RandomSampler
from tests.rlcore.agents.gateways import ADD, answered_by, chat, message_of, names_read, port_of, running, user
from tests.rlcore.environments.tool_templates import HERMES, LLAMA3, MISTRAL, MISTRAL_CONTROLS, with_template
from tests.rlcore.openai_api.hostile import CHAT as CHAT_PATH
from tests.rlcore.openai_api.hostile import HELLO, SAYS, get, messages, refusal, request

RESPONSES_PATH, REWARD = "/v1/responses", "/v1/reward"
DIGITS = "9" * 5000
WRONG = (5, 1.5, True, [], {}, [[]], "x", DIGITS, "\U0001f600" * 300)


def items(*found: Any, **more: Any) -> bytes:
    return request(RESPONSES_PATH, {"input": list(found), **more})


PART = {"role": "user", "content": [{"type": "text", "text": "1"}]}
HOSTILE: Mapping[str, tuple[int, str, bytes]] = {
    **{
        f"{name} to {path}": (400, words, request(path, body))
        for path in (RESPONSES_PATH, REWARD)
        for name, words, body in (("half", "invalid JSON", b'{"a": '), ("a list", "a JSON object", b"[1]"))
    },
    "no path": (404, "there is no POST /, only POST /v1/chat/completions", request("/")),
    "another path": (404, "there is no POST /v1/embeddings", request("/v1/embeddings", b"{}")),
    "a path with dots": (404, "", get("/v1/../etc/passwd")),
    "a path of 5,000 letters": (404, "", get("/" + "a" * 5000)),
    "a path in percent": (404, "", get("/%ff%00%0d%0a")),
    "a path in half of percent": (404, "", get("/%")),
    "another method": (404, "there is no PATCH", request(method="PATCH")),
    "a method of 500 letters": (404, "", request(method="A" * 500)),
    "CONNECT": (404, "", request("example:443", method="CONNECT")),
    **{
        f"a retry count of {value:.9}": (200, "", request(CHAT_PATH, HELLO, f"x-stainless-retry-count: {value}"))
        for value in (DIGITS, "-1", "x", "\xb2", "0")
    },
    **{
        f"{name} {value!r:.20}": (400, words, items(PART if named else {"type": name, "id": value}, **named))
        for value in WRONG
        for name, words, named in (
            ("previous_response_id", "previous_response_id", {"previous_response_id": value}),
            ("item_reference", "input[0]", {}),
        )
    },
    **{
        f"reward {value!r:.20}": (400, "from 0 to 1, not", request(REWARD, {"reward": value}))
        for value in (True, "1", [], {}, None, 10**400, -0.01)
    },
    "a great reward": (400, "not 1e+200 (sampling.agent.reward_range)", request(REWARD, {"reward": 1e200})),
    "a reward of NaN": (400, "Out of range float", request(REWARD, b'{"reward": NaN}')),
    "a body above 4 MiB": (413, "larger than 4194304 bytes", request(body=b"{" + b" " * (4 << 20))),
    "more text than fits": (400, "characters", messages(user("x" * (3 << 20)))),
    "a built-in tool": (
        400,
        "tools[0] has the type web_search: there are no built-in tools, only functions",
        request(CHAT_PATH, HELLO | {"tools": [{"type": "web_search"}]}),
    ),
    "an unknown part": (400, "messages[0].content[0] has the type image_url", messages(user([{"type": "image_url"}]))),
}


@pytest.fixture(scope="module")
def opened(tokenizer: ChatTokenizer, prompts: list[Prompt]) -> Iterator[tuple[Gateway, Session]]:
    with running(RandomSampler(tokenizer), tokenizer) as gateway:
        attacker, honest = (gateway.open(prompts[0], place=0, sample=sample) for sample in (0, 1))
        yield gateway, attacker
        assert message_of(chat(gateway, honest, user("1")))
        record = gateway.close(honest)
        assert (len(record.calls), record.refused, record.error) == (1, (), "")
        assert gateway.close(attacker).error == ""


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_request_is_refused(opened: tuple[Gateway, Session], name: str) -> None:
    (gateway, attacker), (status, words, sent) = opened, HOSTILE[name]
    before = gateway.statistics["refused"]
    found, message = refusal(port_of(gateway), sent, attacker.key)
    assert (found, words in message) == (status, True), message
    assert gateway.statistics["refused"] == before + (status != 200)


def called(**function: Any) -> Json:
    return {"messages": [SAYS, {"role": "assistant", "tool_calls": [{"id": "a", "function": function}]}]}


def with_tool(**function: Any) -> Json:
    return {"tools": [{"type": "function", "function": ADD["function"] | function}]}


CALLED = "messages[1].tool_calls[0].function"
REFUSED_CHATS: tuple[tuple[Json, str], ...] = (
    *(({"tools": value}, "tools") for value in (5, True, {}, "x", [ADD] * 129)),
    *(({"tools": [value]}, "tools[0]") for value in (5, {}, {"type": "web_search"})),
    *((with_tool(**wrong), "tools[0]") for wrong in ({"name": "a b"}, {"name": None}, {"parameters": {"required": 5}})),
    (with_tool(parameters={"properties": {"a": 5}}), "tools[0]"),
    (with_tool(description=5), "tools[0].function.description"),
    *((called(name=value, arguments="{}"), CALLED) for value in (5, True, [], {}, None)),
    *(
        (called(name="f", arguments=value), f"{CALLED}.arguments")
        for value in (5, True, [], "3", "x", "[1]", '{"a": NaN}', '{"a": 1e999}', "[" * 5000, '{"a": ' + DIGITS + "}")
    ),
    *(({"tool_choice": value}, "tool_choice") for value in (5, [], {}, "x", {"type": "custom"})),
    ({"messages": [SAYS | {"role": "tool", "tool_call_id": 5}]}, "messages[0].tool_call_id"),
    ({"messages": [SAYS | {"role": "assistant", "reasoning_content": ["Hm."]}]}, "messages[0].reasoning_content"),
    ({"n": 129}, "n"),
    ({"stop": ["x"] * 65}, "stop"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
    ({"logit_bias": {"1": 5}}, "logit_bias"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"functions": [{"name": "f"}]}, "functions"),
)
REFUSED_RESPONSES: tuple[tuple[Json, str], ...] = (
    *(
        ({"input": [{"type": "reasoning", name: value}]}, f"input[0].{name}")
        for name in ("content", "summary")
        for value in (5, True, "x")
    ),
    *(({"input": [{"type": "reasoning", "content": [value]}]}, "input[0].content[0]") for value in (5, [])),
    ({"input": [{"type": "reasoning", "summary": [{"text": 5}]}]}, "input[0].summary[0].text"),
    ({"input": [{"type": "function_call", "name": "f", "arguments": "{}", "call_id": 5}]}, "input[0].call_id"),
    ({"input": [{"type": "computer_call_output", "call_id": "1"}]}, "input[0]"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]"),
    ({"input": [{"type": []}]}, "input[0].type"),
    ({"input": [SAYS | {"role": "tool"}]}, "input[0].role"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
    ({"input": []}, "input"),
    ({"include": "message.output_text.logprobs"}, "include"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"text": {"format": {"type": "json_schema"}}}, "text"),
    ({"background": True}, "background"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"tools": [{"type": "file_search"}]}, "tools[0]"),
)


@pytest.mark.parametrize(
    ("is_chat", "fields", "param"),
    [*((True, *each) for each in REFUSED_CHATS), *((False, *each) for each in REFUSED_RESPONSES)],
)
def test_what_cannot_be_served_is_refused_by_name(is_chat: bool, fields: Json, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        read_chat({"messages": [SAYS], **fields}) if is_chat else read_responses({"input": "?", **fields}, Stored())
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0, "top_p": 0.1, "seed": 1, "frequency_penalty": 2, "top_logprobs": None},
        {"logit_bias": {}, "response_format": {"type": "text"}, "modalities": ["text"]},
        {"tool_choice": "required", "tools": [{"type": "function", "function": {"name": "f"}}]},
        {"user": "me", "metadata": {"a": "b"}, "store": True, "parallel_tool_calls": False},
    ],
)
def test_what_the_run_decides_or_has_no_effect_is_accepted(fields: dict[str, Any]) -> None:
    assert read_chat({"messages": [SAYS], **fields}).options.n == 1


def test_an_unknown_parameter_is_ignored_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    read_chat({"messages": [SAYS], "next_year": 1, "second": [], "third": None})
    assert [record.getMessage() for record in caplog.records] == ["ignored parameters=next_year, second"]


def test_a_parameter_is_in_one_table_and_those_of_openais_client_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """A parameter that a new client adds is decided here, not by accident."""
    assert not any((DECIDED_BY_THE_RUN & WITHOUT_EFFECT, OFFER.refused.keys() & OFFER.ignored))
    known = {*OFFER.refused, *OFFER.ignored, *names_read(monkeypatch)}
    chats = pytest.importorskip("openai.types.chat.completion_create_params").CompletionCreateParamsBase
    answers = pytest.importorskip("openai.types.responses.response_create_params").ResponseCreateParamsBase
    assert {*chats.__annotations__, *answers.__annotations__} <= known


LIMITS = Limits(max_calls=200_000, max_new_tokens=40_000, max_tokens=50_000)
CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 3, "b": 4}'}}
CHAT: Json = {
    "model": "m",
    "messages": [
        {"role": "system", "content": "Add."},
        {"role": "user", "content": [{"type": "text", "text": "3+4"}, {"type": "refusal", "refusal": "no"}]},
        {"role": "assistant", "content": "I add.", "reasoning_content": "Hm.", "tool_calls": [CALL], "refusal": None},
        {"role": "tool", "content": "7", "tool_call_id": "c"},
        {"role": "user", "content": "So?"},
    ],
    "tools": [ADD],
    "tool_choice": {"type": "function", "function": {"name": "add"}},
    "n": 2,
    "stop": ["a", "b"],
    "logprobs": True,
    "stream": True,
    "stream_options": {"include_usage": True},
    "max_tokens": 3,
    "max_completion_tokens": 4,
    "temperature": 1.0,
    "logit_bias": {},
    "response_format": {"type": "text"},
    "metadata": {"a": "b"},
}
RESPONSES: Json = {
    "model": "m",
    "instructions": "Add.",
    "previous_response_id": None,
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "3+4"}]},
        {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "s"}], "content": []},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I add."}]},
        {"type": "function_call", "name": "add", "arguments": "{}", "call_id": "c"},
        {"type": "function_call_output", "call_id": "c", "output": "7"},
        {"type": "item_reference", "id": "x"},
        {"role": "user", "content": "So?"},
    ],
    "tools": [{"type": "function", **ADD["function"]}],
    "tool_choice": "auto",
    "include": ["message.output_text.logprobs"],
    "stream": False,
    "max_output_tokens": 3,
    "text": {"format": {"type": "text"}},
    "reasoning": {"effort": "low"},
}
RAW = ["NaN", "1e999", "-Infinity", "9" * 400, "9" * 4000, "9" * 5000, '"\\ud800"', "[" * 50 + "]" * 50, "[" * 100_000]
RAW += [
    "[" * 80 + "]" * 80,
    '{"a":' * 60 + "1" + "}" * 60,
    '"' + "x" * 100_000 + '"',
    "[" + '"y",' * 10_000 + '"y"]',
    "1.5",
]
WORDS = [
    "<|im_end|>", "\ue0001\ue001", "<think>", "\x00", "user", "tool", "function", "reasoning", "item_reference",
    "none",
]  # fmt: skip
TEXTS = st.text(max_size=6) | st.sampled_from(WORDS)
FIELDS = st.sampled_from(
    ["type", "properties", "required", "items", "enum", "anyOf", "role", "content", "text", "id", "name"]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 300) | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(FIELDS | TEXTS, inner, max_size=3),
    max_leaves=8,
)
HOLE = "a hole"


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    inner = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        yield from places(each, (*path, key))


def changed(body: Json, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    whole = copy.deepcopy(body)
    inner: Any = whole
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return whole


@pytest.fixture(scope="module")
def sessions(tokenizer: ChatTokenizer) -> Callable[[Prompt, int], tuple[Session, RandomSampler]]:
    """A function that opens an episode with one of four chat templates."""
    own = [
        tokenizer,
        with_template(tokenizer, HERMES),
        with_template(tokenizer, LLAMA3),
        with_template(tokenizer, MISTRAL, *MISTRAL_CONTROLS),
    ]

    @cache
    def gateway(number: int) -> Gateway:
        return Gateway(RandomSampler(own[number]), own[number], LIMITS, temperature=1.0, seed=0)

    def opened(prompt: Prompt, number: int) -> tuple[Session, RandomSampler]:
        session = gateway(number).open(prompt, place=0, sample=0)
        session.stored.items["x"] = {"type": "message", "role": "assistant", "content": "7"}
        return session, RandomSampler(own[number])

    return opened


def status_of(session: Session, engine: RandomSampler, body: str, *, is_chat: bool) -> int:
    """The status of a request from its bytes to the reply's."""
    try:
        reply, events = answered_by(session, engine, body.encode(errors="surrogatepass"), is_chat=is_chat)
        assert json.dumps(reply) and "".join(events).isascii()
    except ApiError as error:
        assert json.dumps(error.body) and len(error.message) < 2000
        return error.status
    return 200


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), is_chat=st.booleans(), template=st.integers(0, 3), raw=st.none() | st.sampled_from(RAW))
def test_any_json_in_any_place_is_answered_or_refused(
    sessions: Any, prompts: list[Prompt], data: st.DataObject, is_chat: bool, template: int, raw: str | None
) -> None:
    body: Any = CHAT if is_chat else RESPONSES
    for number in range(data.draw(st.integers(1, 2))):
        path = data.draw(st.sampled_from(sorted(places(body), key=repr)))
        body = changed(body, path, HOLE if raw and number == 0 else data.draw(VALUES))
    text = json.dumps(body).replace(json.dumps(HOLE), raw or "")
    session, engine = sessions(prompts[0], template)
    assert status_of(session, engine, text, is_chat=is_chat) in (200, 400, 403)
    again = json.dumps({"messages": [{"role": "user", "content": "?"}], "n": 1})
    assert status_of(session, engine, again, is_chat=True) == 200  # the episode is intact


def test_the_valid_bodies_are_answered(sessions: Any, prompts: list[Prompt]) -> None:
    for is_chat, body in ((True, CHAT), (False, RESPONSES)):
        statuses = [status_of(*sessions(prompts[0], number), json.dumps(body), is_chat=is_chat) for number in range(4)]
        assert statuses == [200, 200, 200, 200]


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(
    sessions: Any, prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    session, engine = sessions(prompts[0], 0)
    monkeypatch.setattr(PartEncoder, "encode", None)
    body = {"messages": [{"role": "user", "content": "x " * 2_000_000}]}
    with within_seconds(), pytest.raises(ApiError, match=r"the prompt has 40000.. characters, and 50000 tokens"):
        session.located(read_chat(body))
    assert engine.made == []

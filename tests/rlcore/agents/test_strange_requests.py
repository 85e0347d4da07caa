"""Any JSON in any place of a request: it is answered, or refused with a status of the client's fault. Nothing else."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlcore.agents.desk import Desk
from rlcore.agents.gateway import Gateway
from rlcore.agents.requests import read_chat
from rlcore.agents.responses import read_responses
from rlcore.agents.session import Limits, Session
from rlcore.openai_api.errors import ApiError
from rlcore.openai_api.requests import Json, read_json
from rlcore.sampling.base import SamplingParams
from rlcore.text.text_parts import PartEncoder
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import Prompt
from tests.quick import within_seconds
from tests.rlcore.agents.gateways import ADD, RandomSampler, digest
from tests.rlcore.environments.tool_templates import HERMES, LLAMA3, MISTRAL, MISTRAL_CONTROLS, with_template

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
RAW = [
    "NaN",
    "1e999",
    "-Infinity",
    "9" * 400,
    "9" * 4000,
    "9" * 5000,
    '"\\ud800"',
    "[" * 50 + "]" * 50,
    "[" * 80 + "]" * 80,
]
RAW += ["[" * 100_000, '{"a":' * 60 + "1" + "}" * 60, '"' + "x" * 100_000 + '"', "[" + '"y",' * 10_000 + '"y"]', "1.5"]
TEXTS = st.text(max_size=6) | st.sampled_from(
    [
        "<|im_end|>",
        "\ue0001\ue001",
        "<think>",
        "\x00",
        "user",
        "tool",
        "function",
        "reasoning",
        "item_reference",
        "none",
    ]
)
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
    """The path of every subvalue."""
    yield path
    inner = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        yield from places(each, (*path, key))


def changed(body: Json, path: tuple[Any, ...], value: Any) -> Any:
    """A body with another value in a place."""
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
        found = read_json(body.encode(errors="surrogatepass"))
        request = read_chat(found) if is_chat else read_responses(found, session.stored)
        asked = session.ask(session.located(request), digest(body))
        params = SamplingParams(temperature=1.0, max_new_tokens=9, num_samples=1)
        Desk(lambda: 1).serve(asked.tickets, engine, params, seed=0)
        assert asked.error is None
        session.set_delivered(asked)
        reply, events = session.written(asked)
        assert json.dumps(reply) and "".join(events).isascii()
    except ApiError as error:
        assert json.dumps(error.body) and len(error.message) < 2000
        return error.status
    return 200


@settings(max_examples=500, suppress_health_check=[HealthCheck.function_scoped_fixture])
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


@pytest.mark.parametrize(
    ("is_chat", "path", "value"),
    [
        (False, ("previous_response_id",), []),
        (False, ("previous_response_id",), {}),
        (False, ("input", 5, "id"), ["x"]),
        (False, ("input", 1, "content"), 5),
        (False, ("input", 1, "summary"), True),
        (False, ("input", 3, "call_id"), 5),
        (False, ("input", 0, "type"), []),
        (False, ("include",), "message.output_text.logprobs"),
        (True, ("stream_options",), 0),
        (True, ("messages", 0, "role"), ["user"]),
        (True, ("messages", 3, "tool_call_id"), 5),
        (True, ("messages", 2, "reasoning_content"), ["Hm."]),
        (True, ("model",), {}),
        (True, ("n",), 1.0),
        (True, ("stop",), ["x"] * 10_000),
        (True, ("stop",), "x" * 10_000),
        (True, ("messages",), [{"role": "user", "content": "x"}] * 5000),
        (True, ("tools",), [ADD] * 129),
        (True, ("tools", 0, "function", "parameters"), {"required": 5}),
        (True, ("tools", 0, "function", "parameters"), {"properties": {"a": 5}}),
        (True, ("tools", 0, "function", "description"), 5),
    ],
)
def test_a_value_of_the_wrong_type_or_size_is_refused(
    sessions: Any, prompts: list[Prompt], is_chat: bool, path: tuple[Any, ...], value: Any
) -> None:
    body = changed(CHAT if is_chat else RESPONSES, path, value)
    assert status_of(*sessions(prompts[0], 1), json.dumps(body), is_chat=is_chat) == 400


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

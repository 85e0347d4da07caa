"""A gateway that runs while a test asks it, with scripted or random answers."""

from __future__ import annotations

import dataclasses
import hashlib
import http.client
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import pytest

from rlcore.agents.gateway import Desk, Gateway
from rlcore.agents.requests import Stored, read_chat, read_responses
from rlcore.agents.session import Limits, Session
from rlcore.openai_api.requests import Fields, read_json
from rlcore.sampling.base import Sampler, SamplingParams
from rlcore.sampling.scripted import ScriptedSampler
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import Rollout
from tests.rlcore.environments.tool_templates import HERMES, with_template
from tests.waiting import LONG

Episode = Callable[..., AbstractContextManager[tuple[Gateway, Session]]]
LIMITS = Limits(max_calls=32, max_new_tokens=600, max_tokens=1000)
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
            "required": ["a", "b"],
        },
    },
}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 3, "b": 4}}</tool_call>'


RESPONSE_TEMPLATE = {
    "start_anchor": "<|im_start|>assistant\n",
    "defaults": {"role": "assistant"},
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>"},
        "tool_calls": {
            "open": "<call>",
            "close": "</call>",
            "content": "json",
            "repeats": True,
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {},
    },
}


def with_response_template(tokenizer: ChatTokenizer) -> ChatTokenizer:
    """The tokenizer of a model whose format of calls rlcore does not know."""
    own = with_template(tokenizer, HERMES.replace("<tool_call>", "<call>"))
    own.hf_tokenizer.response_template = RESPONSE_TEMPLATE
    return own


def scripted(tokenizer: ChatTokenizer, name: str, turns: Sequence[str], *, sample: int = 0) -> ScriptedSampler:
    """An engine with the answers to the calls of one episode."""
    return ScriptedSampler.from_texts(
        {f"{name}/{sample}/{number}": [turn] for number, turn in enumerate(turns, start=1)}, tokenizer
    )


@contextmanager
def running(
    engine: Sampler, tokenizer: ChatTokenizer, limits: Limits = LIMITS, *, seed: int = 0, temperature: float = 1.0
) -> Iterator[Gateway]:
    done = threading.Event()
    with Gateway(engine, tokenizer, limits, temperature=temperature, seed=seed) as gateway:
        thread = threading.Thread(target=gateway.serve, args=(done.is_set,))
        thread.start()
        try:
            yield gateway
        finally:
            done.set()
            thread.join(LONG)
            assert not thread.is_alive()


@dataclass(frozen=True)
class Reply:
    """Reply to a request; ``body`` is JSON, or the text of a stream."""

    status: int
    body: Any
    headers: Mapping[str, str]

    @property
    def message(self) -> str:
        return str(self.body["error"]["message"])

    @property
    def code(self) -> str:
        return str(self.body["error"]["code"])


def connect(gateway: Gateway) -> http.client.HTTPConnection:
    return http.client.HTTPConnection("127.0.0.1", port_of(gateway), timeout=LONG)


def ask(
    gateway: Gateway,
    session: Session | str,
    path: str,
    body: Mapping[str, Any] | bytes | None = None,
    *,
    retry: int = 0,
    method: str = "POST",
) -> Reply:
    key = session if isinstance(session, str) else session.key
    headers = {"Authorization": f"Bearer {key}", "x-stainless-retry-count": str(retry)}
    connection = connect(gateway)
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    try:
        connection.request(method, path, data, headers)
        answer = connection.getresponse()
        content = answer.read()
        is_json = answer.headers["Content-Type"] == "application/json"
        return Reply(answer.status, json.loads(content) if is_json else content.decode(), dict(answer.headers))
    finally:
        connection.close()


def chat(
    gateway: Gateway, session: Session | str, *messages: Mapping[str, Any], retry: int = 0, **fields: Any
) -> Reply:
    body = {"model": "any", "messages": list(messages), **fields}
    return ask(gateway, session, "/v1/chat/completions", body, retry=retry)


def leaver(gateway: Gateway, session: Session) -> http.client.HTTPConnection:
    """The connection of a client that has asked and reads no reply."""
    connection = connect(gateway)
    body = json.dumps({"messages": [user("3+4")]})
    connection.request("POST", "/v1/chat/completions", body, {"Authorization": f"Bearer {session.key}"})
    return connection


def user(text: str | list[Any]) -> dict[str, Any]:
    return {"role": "user", "content": text}


def message_of(reply: Reply, number: int = 0) -> dict[str, Any]:
    """The message of a chat completion, as an agent sends it back."""
    assert reply.status == 200, reply.body
    message: dict[str, Any] = reply.body["choices"][number]["message"]
    return message


def port_of(gateway: Gateway) -> int:
    return urlsplit(gateway.url).port or 0


def answered_by(session: Session, engine: Sampler, body: bytes, *, is_chat: bool) -> tuple[Any, Iterator[str]]:
    """The reply to a request that the engine answers at once, and the events of its stream."""
    found = read_json(body)
    request = read_chat(found) if is_chat else read_responses(found, session.stored)
    asked = session.ask(session.located(request), hashlib.sha256(body).hexdigest())
    params = SamplingParams(temperature=1.0, max_new_tokens=9, num_samples=1)
    Desk(lambda: 1).serve(asked.tickets, engine, params, seed=0)
    assert asked.done.exception() is None and asked.answers
    session.set_delivered(asked)
    return session.written(asked)


def names_read(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The parameters that either API reads."""
    read, value = set[str](), Fields.value

    def noted(self: Fields, field: str) -> object:
        read.update([] if self.where else [field])
        return value(self, field)

    monkeypatch.setattr(Fields, "value", noted)
    read_chat({"messages": [user("1")]})
    read_responses({"input": "1"}, Stored())
    return read


def sampled(rollout: Rollout) -> list[tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]]:
    """Own turns of all samples: the tokens before each, its tokens and its log-probabilities."""
    return sorted(
        (sample.prompt.token_ids + sample.completion_ids[:start], sample.completion_ids[start:end],
         sample.sampler_logprobs[start:end])
        for sample in rollout.samples
        for start, end in sample.turns
    )  # fmt: skip


def answered(made: Sequence[Rollout]) -> list[tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]]:
    return sorted((each.prompt.token_ids, each.completion_ids, each.sampler_logprobs) for each in made)


def until_stop(made: Rollout, stops: Sequence[str], tokenizer: ChatTokenizer) -> Rollout:
    """An answer as an engine would end it that looks for the stop strings after each token."""
    ids = [number for number in made.completion_ids if number not in tokenizer.eos_ids]
    for length in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:length])
        if found := [text.index(stop) for stop in stops if stop in text]:
            kept = {name: getattr(made, name)[:length] for name in ("completion_ids", "sampler_logprobs", "loss_mask")}
            return dataclasses.replace(made, **kept, finish_reason="stop", text=text[: min(found)])
    return dataclasses.replace(made, text=tokenizer.decode(ids))


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()

"""OpenAI's own client against the gateway: both APIs, tools, streams and errors."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from rlcore.agents.gateway import Gateway, Session
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import Prompt
from tests.rlcore.agents.gateways import ADD, CALL, Gated, running, scripted
from tests.rlcore.environments.tool_templates import HERMES, with_template
from tests.waiting import until

openai = pytest.importorskip("openai")
TURNS = [f"<think>Add them.</think>\nI add.\n{CALL}", "It is 7."]
FLAT = {"type": "function", **ADD["function"]}


@contextmanager
def client(tokenizer: ChatTokenizer, prompt: Prompt, *, retries: int = 2) -> Iterator[tuple[Any, Gateway, Session]]:
    """A client, whose key opens an episode with two scripted turns."""
    own = with_template(tokenizer, HERMES)
    with running(scripted(own, prompt.prompt_id, TURNS), own) as gateway:
        session = gateway.open(prompt, place=0, sample=0)
        with openai.OpenAI(base_url=gateway.url, api_key=session.key, max_retries=retries) as made:
            yield made, gateway, session


def test_a_chat_with_a_tool_is_one_sample(tokenizer: ChatTokenizer, prompts: list[Prompt]) -> None:
    with client(tokenizer, prompts[0]) as (made, gateway, session):
        messages: list[Any] = [{"role": "user", "content": "3+4"}]
        first = made.chat.completions.create(model="gpt-5", messages=messages, tools=[ADD], temperature=0)
        message = first.choices[0].message
        (call,) = message.tool_calls
        assert (message.content, message.reasoning_content, call.function.name) == ("I add.", "Add them.", "add")
        assert json.loads(call.function.arguments) == {"a": 3, "b": 4}
        messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "7"}]
        second = made.chat.completions.create(model="gpt-5", messages=messages, tools=[ADD])
        rollout = gateway.close(session).rollout
    assert second.choices[0].message.content == "It is 7." and rollout is not None and len(rollout.turns) == 2


def test_a_streamed_chat_is_the_whole_one(tokenizer: ChatTokenizer, prompts: list[Prompt]) -> None:
    fields: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "3+4"}], "tools": [ADD]}
    with client(tokenizer, prompts[0]) as (made, gateway, session):
        whole = made.chat.completions.create(**fields)
        plain = gateway.close(session).rollout
    with client(tokenizer, prompts[0]) as (made, gateway, session):
        with made.chat.completions.stream(**fields, stream_options={"include_usage": True}) as stream:
            found = stream.get_final_completion()
        assert gateway.close(session).rollout == plain
    one, other = (each.choices[0].message for each in (found, whole))
    assert (one.content, found.choices[0].finish_reason, found.usage) == (other.content, "tool_calls", whole.usage)
    calls = [
        [(call.id, call.function.name, call.function.arguments) for call in each.tool_calls] for each in (one, other)
    ]
    assert calls[0] == calls[1]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_responses_with_a_tool_are_one_sample(
    tokenizer: ChatTokenizer, prompts: list[Prompt], is_streamed: bool
) -> None:
    def respond(made: Any, **fields: Any) -> Any:
        if not is_streamed:
            return made.responses.create(model="m", tools=[FLAT], **fields)
        with made.responses.stream(model="m", tools=[FLAT], **fields) as stream:
            events = [event.type for event in stream]
            assert events[0] == "response.created" and events[-1] == "response.completed"
            return stream.get_final_response()

    with client(tokenizer, prompts[0]) as (made, gateway, session):
        first = respond(made, input="3+4", instructions="Be brief.")
        thought, message, call = first.output
        assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
        assert (thought.content[0].text, message.content[0].text) == ("Add them.", "I add.")
        history = [{"role": "user", "content": "3+4"}, *(item.model_dump(exclude_none=True) for item in first.output)]
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "7"}
        second = respond(made, input=[*history, output], instructions="Be brief.")
        rollout = gateway.close(session).rollout
    assert second.output_text == "It is 7." and second.status == "completed"
    assert rollout is not None and rollout.branches == () and len(rollout.turns) == 2


def test_the_client_raises_its_own_errors_and_repeats_no_request(
    tokenizer: ChatTokenizer, prompts: list[Prompt]
) -> None:
    with client(tokenizer, prompts[0]) as (made, gateway, session):
        create, messages = made.chat.completions.create, [{"role": "user", "content": "3+4"}]
        with pytest.raises(openai.BadRequestError, match="logit_bias is not supported"):
            create(model="m", messages=messages, logit_bias={"5": 1})
        with pytest.raises(openai.BadRequestError, match="no room for an answer") as caught:
            create(model="m", messages=[{"role": "user", "content": "x" * 2000}])
        assert caught.value.code == "context_length_exceeded"
        with pytest.raises(openai.AuthenticationError):
            made.with_options(api_key="sk-other").models.list()
        with pytest.raises(openai.PermissionDeniedError, match="max_calls = 32"):
            create(model="m", messages=messages, n=33)
        gateway.close(session)
        with pytest.raises(openai.ConflictError, match="the episode is over"):
            create(model="m", messages=messages)
        assert gateway.statistics["late_calls"] == 1 and gateway.statistics["requests"] == 0


def test_the_clients_retry_after_a_timeout_gets_the_answer_that_the_engine_had_begun(
    tokenizer: ChatTokenizer, prompts: list[Prompt]
) -> None:
    engine = Gated(tokenizer)
    with running(engine, tokenizer) as gateway:
        session = gateway.open(prompts[0], place=0, sample=0)

        def release() -> None:
            until(lambda: gateway.statistics["retries"])
            engine.may_answer.set()

        threading.Thread(target=release).start()
        with openai.OpenAI(base_url=gateway.url, api_key=session.key, max_retries=3, timeout=5.0) as made:
            made.chat.completions.create(model="m", messages=[{"role": "user", "content": "3+4"}])
        record = gateway.close(session)
    assert engine.batches == [1] and record.rollout is not None and record.rollout.branches == ()

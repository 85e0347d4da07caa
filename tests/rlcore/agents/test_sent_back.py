"""Sampled texts that are sent back: any sampled text, sent back verbatim, continues its own answer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from rlcore.agents.desk import Desk
from rlcore.agents.gateway import Gateway
from rlcore.agents.requests import read_chat
from rlcore.agents.responses import read_responses
from rlcore.agents.session import Limits, Session
from rlcore.sampling.base import SamplingParams
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import Prompt, Rollout
from tests.rlcore.agents.engines import Parrot
from tests.rlcore.agents.gateways import ADD, digest, user
from tests.rlcore.environments.tool_templates import HERMES, LLAMA3, MISTRAL, MISTRAL_CONTROLS, with_template

LIMITS = Limits(max_calls=24, max_new_tokens=100_000, max_tokens=200_000)
NAMES = ["add", "search web", "", "add()", "加法", "a" * 129, "a.b/c-d:e", "add\n", 7, None]
VALUES = ["3", '"x"', "NaN", "-Infinity", "1e999", "1e22", "9" * 400, "9" * 5000, "[" * 70 + "]" * 70, r'"\ud800"', "é"]
OBJECTS = ["{}", "[]", "3", '"{}"', '{"a": {"b": [1.0]}}', *(f'{{"a": {value}, "b": 4}}' for value in VALUES)]
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


TURNS = st.lists(calls() | st.sampled_from(MARKS) | st.text(max_size=6), max_size=5).map("".join)
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


class Saying(Parrot):
    """An engine that writes the same turn again and again, with the control tokens in it."""

    def __init__(self, tokenizer: ChatTokenizer, turn: str) -> None:
        super().__init__(tokenizer)
        self._turn = turn

    def _answered(self, prompt: Prompt, params: SamplingParams) -> Rollout:
        ids = (*self._tokenizer.encode(self._turn, "template"), *self._tokenizer.end_of_turn)
        return Rollout(
            prompt=prompt,
            completion_ids=ids,
            sampler_logprobs=(-1.0,) * len(ids),
            loss_mask=(True,) * len(ids),
            policy_version=0,
            finish_reason="stop",
            text="",
        )


def tokenizers(tokenizer: ChatTokenizer) -> Mapping[str, ChatTokenizer]:
    own = with_template(tokenizer, HERMES.replace("<tool_call>", "<call>"))
    own.hf_tokenizer.response_template = RESPONSE_TEMPLATE
    return {
        "hermes": with_template(tokenizer, HERMES),
        "llama3": with_template(tokenizer, LLAMA3),
        "mistral": with_template(tokenizer, MISTRAL, *MISTRAL_CONTROLS),
        "ours": tokenizer,
        "response template": own,
    }


def answered(session: Session, engine: Saying, body: Mapping[str, Any], *, is_chat: bool) -> Mapping[str, Any]:
    """The body of the reply to a request."""
    known = json.loads(json.dumps(body))
    request = read_chat(known) if is_chat else read_responses(known, session.stored)
    asked = session.ask(session.located(request), digest(json.dumps(body)))
    Desk(lambda: 1).serve(
        asked.tickets, engine, SamplingParams(temperature=1.0, max_new_tokens=9, num_samples=1), seed=0
    )
    assert asked.error is None and asked.answers
    session.set_delivered(asked)
    return json.loads(json.dumps(session.written(asked)[0]))


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
    gateway = Gateway(engine, own, LIMITS, temperature=1.0, seed=0)
    session = gateway.open(prompt, place=0, sample=0)
    tools, field = ([ADD], "messages") if is_chat else ([{"type": "function"} | ADD["function"]], "input")
    first = answered(session, engine, {field: [user("3+4")], "tools": tools}, is_chat=is_chat)
    history = [user("3+4"), *sent_back(first, is_chat=is_chat), user("So?")]
    answered(session, engine, {field: history, "tools": tools}, is_chat=is_chat)
    return [(call.parent, call.fork) for call in gateway.close(session).calls]


@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(form="hermes", turn='<tool_call>{"name": "search web", "arguments": {}}</tool_call>', is_chat=True)
@example(form="hermes", turn='<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', is_chat=False)
@given(
    form=st.sampled_from(FORMS),
    turn=TURNS,
    is_chat=st.booleans(),
)
def test_any_sampled_text_sent_back_continues_its_answer(
    tokenizer: ChatTokenizer, prompts: list[Prompt], form: str, turn: str, is_chat: bool
) -> None:
    own = tokenizers(tokenizer)[form]
    for control in own.special_tokens:
        if control not in MARKS:
            turn = turn.replace(control, "")
    assert play(own, prompts[0], turn, is_chat=is_chat) == [(None, ""), (1, "")]

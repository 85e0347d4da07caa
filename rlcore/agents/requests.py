"""Requests and responses of agents, in both APIs: conversations with tools, and parameters that the run decides.

Replies to chat completions are written by ``rlcore.openai_api``, those of ``POST /v1/responses`` here. Turns and items
of earlier responses are kept for the session.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Literal
from uuid import uuid4

from rlcore.environments.base import json_value
from rlcore.environments.call_arguments import declaration_errors
from rlcore.errors import shown
from rlcore.openai_api import requests as wire
from rlcore.openai_api.replies import FunctionCall, Piece, event, logprob_entries
from rlcore.openai_api.requests import ApiError, Fields, Json, read_fields, text_of
from rlcore.types import Role

Kind = Literal["chat", "responses"]
MAX_TOOLS = 128  # of a request, as in OpenAI's API
_NO_ARGUMENTS: Json = {"type": "object", "properties": {}}
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
_LOGPROBS = "message.output_text.logprobs"
_REPEATED = ("metadata", "max_output_tokens", "previous_response_id", "tools", "tool_choice", "reasoning")
_EMPTY: Mapping[str, Json] = {
    "message": {"content": []},
    "function_call": {"arguments": ""},
    "reasoning": {"content": []},
}

DECIDED_BY_THE_RUN = frozenset(
    {"temperature", "top_p", "top_k", "min_p", "seed"} | {"frequency_penalty", "presence_penalty", "repetition_penalty"}
)
"""The recorded log-probabilities belong to the run's own distribution, whatever the agent wants."""

WITHOUT_EFFECT = frozenset(
    {"user", "metadata", "store", "service_tier", "parallel_tool_calls", "reasoning_effort", "reasoning", "verbosity"}
    | {"prediction", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "safety_identifier"}
    | {"truncation", "max_tool_calls", "moderation", "background_options", "access_programs", "image"}
)
OFFER = wire.Offer(
    max_choices=128,  # as in OpenAI's API
    max_stops=64,
    model="policy",
    refused={
        **wire.UNSUPPORTED,
        "text": (wire.is_plain_text, "answers are not constrained, so describe the form in a message"),
        "top_logprobs": (wire.only(0), "only sampled tokens have log-probabilities, so remove it"),
        "background": (wire.only(False), "answers are sampled at once, so remove it"),
        "conversation": (wire.only(), "send the items in input, or name previous_response_id"),
        "prompt": (wire.only(), "stored prompts do not exist here, so write it in instructions"),
        "context_management": (wire.only([]), "shorten the input in the agent, which is then a new branch"),
    },
    ignored=DECIDED_BY_THE_RUN | WITHOUT_EFFECT,
    ignores_unknown=True,  # clients add parameters faster than agents change
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """Message. ``thought``: reasoning apart from the content. ``call_id``: call that the output of a tool answers."""

    role: Role
    content: str = ""
    thought: str = ""
    calls: tuple[FunctionCall, ...] = ()
    call_id: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """Request for answers to a conversation, in either API.

    Attributes:
        tools: JSON list of the declared tools in the form of chat completions, or "".
        _may_call: False if the agent wants no calls, although it declares tools.
        fields: Parameters that a response repeats.
    """

    kind: Kind
    options: wire.Options
    turns: tuple[Turn, ...]
    tools: str = ""
    may_call: bool = True
    fields: Json = field(default_factory=dict)


def read_chat(body: Json) -> Request:
    """Return the request in a body of ``/v1/chat/completions``.

    Raises:
        ApiError: A parameter is invalid or not supported.
    """
    fields = read_fields(body, OFFER)
    request = Request(
        kind="chat",
        options=wire.options_of(fields, is_chat=True),
        turns=tuple(_turn(role, content, message) for role, content, message in wire.chat_messages(fields, wire.ROLES)),
        tools=_declared_tools(fields),
        may_call=_may_call(fields),
    )
    fields.end()
    return request


def _turn(role: Role, content: str, message: Fields) -> Turn:
    if role == "tool":
        return Turn(role=role, content=content, call_id=message.text("tool_call_id") or message.text("name"))
    if role != "assistant":
        return Turn(role=role, content=content)
    functions = ((call, call.fields("function")) for call in message.objects("tool_calls"))
    return Turn(
        role=role,
        content=content or message.text("refusal"),
        thought=message.text("reasoning_content") or message.text("reasoning"),
        calls=tuple(
            function_call(function.value("name"), function.value("arguments"), call.text("id"), call.path("function"))
            for call, function in functions
        ),
    )


def function_call(name: object, arguments: object, call_id: str, param: str) -> FunctionCall:
    """Return a call. The gateway hands out what this function accepts, and nothing else.

    Raises:
        ApiError: The call has no valid name, or arguments that are no JSON object.
    """
    try:
        found = json_value((arguments if isinstance(arguments, str) else json.dumps(arguments)) or "{}")
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise wire.wrong_type(arguments, f"{param}.arguments", "a JSON object as text")
    return FunctionCall(name=_name(name, param), arguments=json.dumps(found, ensure_ascii=False), call_id=call_id)


def _name(name: object, param: str) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        what = f"{param} has no valid name, 1 to 128 of A-Z a-z 0-9 _ . : / -, but '{shown(name, max_chars=60)}'"
        raise ApiError(400, what, param=param)
    return name


def _declared_tools(fields: Fields) -> str:
    found = [_declared(tool, tool.where) for tool in fields.objects("tools", MAX_TOOLS)]
    return json.dumps(found, ensure_ascii=False) if found else ""


def _declared(tool: Fields, param: str) -> dict[str, Any]:
    if (kind := tool.value("type")) != "function":
        what = f"{param} has the type {shown(kind, max_chars=60)}: there are no built-in tools, only functions"
        raise ApiError(400, what, code="unsupported_tool", param=param)
    function = tool.fields("function") if tool.has("function") else tool
    own: dict[str, Any] = {
        "name": _name(function.value("name"), param),
        "description": function.text("description"),
        "parameters": function.json_object("parameters") or _NO_ARGUMENTS,
    }
    if errors := declaration_errors(own["name"], {"function": own}):
        raise ApiError(400, shown(f"{param}: {errors[0]}"), param=param)
    return {"type": "function", "function": {key: value for key, value in own.items() if value}}


def _may_call(fields: Fields) -> bool:
    """Return False for ``tool_choice = "none"``. A required call cannot be enforced on the policy: it is ``auto``."""
    value = fields.value("tool_choice")
    kind = value.get("type") if isinstance(value, Mapping) else None
    if value not in (None, "auto", "none", "required") and kind not in ("function", "allowed_tools"):
        what = f"tool_choice must be auto, none, required or a function, not {shown(value, max_chars=60)}"
        raise ApiError(400, what, code="unsupported_parameter", param="tool_choice")
    return bool(value != "none")


@dataclass(frozen=True, slots=True)
class Stored:
    """Responses of a session: the turns up to each, without instructions, and the items of all."""

    turns: dict[str, tuple[Turn, ...]] = field(default_factory=dict)
    items: dict[str, Json] = field(default_factory=dict)

    def add(self, request: Request, answer: Piece, body: Json) -> None:
        start = 1 if request.fields["instructions"] else 0
        turn = Turn(role="assistant", content=answer.text, thought=answer.thought, calls=answer.calls)
        self.turns[body["id"]] = (*request.turns[start:], turn)
        self.items.update({item["id"]: item for item in body["output"]})


def read_responses(body: Json, stored: Stored) -> Request:
    """Return the request in a body of ``/v1/responses``.

    Raises:
        ApiError: A parameter is invalid or not supported, or the named response is not of this session.
    """
    fields = read_fields(body, OFFER)
    instructions = text_of(fields.value("instructions"), "instructions")
    previous = fields.text("previous_response_id")
    if previous and previous not in stored.turns:
        what = f"previous_response_id {shown(previous, max_chars=80)} is no response of this episode"
        raise ApiError(400, what, code="previous_response_not_found", param="previous_response_id")
    said = fields.value("input")
    new = [Turn(role="user", content=said)] if isinstance(said, str) else _turns_of(fields, stored.items)
    turns = (*stored.turns.get(previous, ()), *new)
    if not turns:
        raise ApiError(400, "input is empty", param="input")
    head = (Turn(role="system", content=instructions),) if instructions else ()
    fields.json_object("stream_options")
    options = wire.Options(
        model=fields.model,
        max_tokens=fields.integer("max_output_tokens", 1, wire.MAX_TOKENS),
        top_logprobs=0 if _LOGPROBS in fields.items("include") else None,
        stream=fields.flag("stream"),
    )
    request = Request(
        kind="responses",
        options=options,
        turns=head + turns,
        tools=_declared_tools(fields),
        may_call=_may_call(fields),
        fields={name: body.get(name) for name in _REPEATED} | {"instructions": instructions or None},
    )
    fields.end()
    return request


def _turns_of(fields: Fields, known: Mapping[str, Json]) -> list[Turn]:
    """Return the turns in input items. A thought, a message and the calls after it are one turn of the assistant."""
    turns: list[Turn] = []
    thought, is_open = "", False  # open: the last turn is the assistant's, and calls join it
    for raw in fields.objects("input"):
        item = _resolved(raw, known)
        kind = item.text("type") or "message"
        if kind == "reasoning":
            thought = "".join(part.text("text") for name in ("content", "summary") for part in item.objects(name))
            is_open = False
        elif kind == "function_call":
            call = function_call(item.value("name"), item.value("arguments"), item.text("call_id"), item.where)
            if not is_open:
                turns.append(Turn(role="assistant", thought=thought))
            turns[-1] = replace(turns[-1], calls=(*turns[-1].calls, call))
            thought, is_open = "", True
        elif kind == "function_call_output":
            output = text_of(item.value("output"), item.path("output"))
            turns.append(Turn(role="tool", content=output, call_id=item.text("call_id")))
            is_open = False
        elif kind == "message":
            role, content = wire.role_of(item, wire.SPOKEN), text_of(item.value("content"), item.path("content"))
            is_open = role == "assistant"
            turns.append(Turn(role=role, content=content, thought=thought if is_open else ""))
            thought = ""
        else:
            named = f"{item.where} has the type {shown(kind, max_chars=60)}"
            what = f"{named}: send messages, function calls and their outputs"
            raise ApiError(400, what, code="unsupported_item", param=item.where)
    return turns


def _resolved(item: Fields, known: Mapping[str, Json]) -> Fields:
    if item.value("type") != "item_reference":
        return item
    name = item.text("id")
    if name not in known:
        what = f"{item.where} refers to '{shown(name, max_chars=80)}', which is no item of this episode"
        raise ApiError(400, what, code="item_not_found", param=item.where)
    return Fields(known[name], item.offer, item.where)


def responses_body(request: Request, answer: Piece, num_prompt_tokens: int) -> dict[str, Any]:
    """Return the body of the reply."""
    name = uuid4().hex
    fields, options, is_cut = request.fields, request.options, answer.finish == "length"
    return {
        "id": f"resp_{name}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "incomplete" if is_cut else "completed",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "model": options.model,
        "output": _output(answer, name, is_cut=is_cut, logprobs=options.top_logprobs is not None),
        "usage": {
            "input_tokens": num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": answer.num_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": num_prompt_tokens + answer.num_tokens,
        },
        "parallel_tool_calls": True,
        "text": {"format": {"type": "text"}},
        "truncation": "disabled",
        "store": True,
        **fields,
        "tools": fields["tools"] or [],
        "tool_choice": fields["tool_choice"] or "auto",
        "metadata": fields["metadata"] or {},
    }


def _output(answer: Piece, name: str, *, is_cut: bool, logprobs: bool) -> list[dict[str, Any]]:
    status, items = "incomplete" if is_cut else "completed", []
    if answer.thought:
        content = [{"type": "reasoning_text", "text": answer.thought}]
        items.append({"type": "reasoning", "id": f"rs_{name}", "summary": [], "content": content, "status": status})
    if answer.text or not answer.calls:
        found = logprob_entries(answer.logprobs) if logprobs else []
        text = {"type": "output_text", "text": answer.text, "annotations": [], "logprobs": found}
        items.append({"type": "message", "id": f"msg_{name}", "role": "assistant", "status": status, "content": [text]})
    for number, call in enumerate(answer.calls):
        written = {"name": call.name, "arguments": call.arguments, "call_id": call.call_id}
        items.append({"type": "function_call", "id": f"fc_{name}_{number}", **written, "status": status})
    return items


def response_events(body: Json) -> Iterator[str]:
    """Yield a response as the events of its stream."""
    numbers = count()

    def numbered(kind: str, **fields: Any) -> str:
        return event({"type": kind, "sequence_number": next(numbers), **fields}, kind)

    begun = {**body, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    yield numbered("response.created", response=begun)
    yield numbered("response.in_progress", response=begun)
    for index, item in enumerate(body["output"]):
        started = {**item, **_EMPTY[item["type"]], "status": "in_progress"}
        yield numbered("response.output_item.added", output_index=index, item=started)
        for kind, fields in _parts(item):
            yield numbered(kind, output_index=index, item_id=item["id"], **fields)
        yield numbered("response.output_item.done", output_index=index, item=item)
    yield numbered(f"response.{body['status']}", response=body)


def _parts(item: Json) -> Iterator[tuple[str, Json]]:
    if item["type"] == "function_call":
        yield "response.function_call_arguments.delta", {"delta": item["arguments"]}
        yield "response.function_call_arguments.done", {"arguments": item["arguments"], "name": item["name"]}
        return
    (part,) = item["content"]
    kind, place, text = part["type"], {"content_index": 0}, part["text"]
    logprobs = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
    yield "response.content_part.added", {**place, "part": {**part, "text": ""}}
    if text:
        yield f"response.{kind}.delta", {**place, "delta": text, **logprobs}
    yield f"response.{kind}.done", {**place, "text": text, **logprobs}
    yield "response.content_part.done", {**place, "part": part}

"""Responses: ``POST /v1/responses``. Turns and items of earlier ones are kept for the session."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any
from uuid import uuid4

from rlcore.agents.requests import OFFER, Request, Turn, declared_tools, function_call, may_call
from rlcore.errors import shown
from rlcore.openai_api.replies import Piece, event, logprob_entries
from rlcore.openai_api.requests import (
    MAX_TOKENS,
    SPOKEN,
    ApiError,
    Fields,
    Json,
    Options,
    read_fields,
    role_of,
    text_of,
)

_LOGPROBS = "message.output_text.logprobs"
_REPEATED = ("metadata", "max_output_tokens", "previous_response_id", "tools", "tool_choice", "reasoning")
_EMPTY: Mapping[str, Json] = {
    "message": {"content": []},
    "function_call": {"arguments": ""},
    "reasoning": {"content": []},
}


@dataclass(frozen=True, slots=True)
class Stored:
    """Responses of a session: the turns up to each, without instructions, and the items of all."""

    turns: dict[str, tuple[Turn, ...]] = field(default_factory=dict)
    items: dict[str, Json] = field(default_factory=dict)

    def add(self, request: Request, answer: Piece, body: Json) -> None:
        """Store a response."""
        start = 1 if request.fields["instructions"] else 0
        turn = Turn(role="assistant", content=answer.text, thought=answer.thought, calls=answer.calls)
        self.turns[body["id"]] = (*request.turns[start:], turn)
        self.items.update({item["id"]: item for item in body["output"]})


def read_responses(body: Json, stored: Stored) -> Request:
    """Return the request in a body.

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
    new = [Turn(role="user", content=said)] if isinstance(said, str) else turns_of(fields, stored.items)
    turns = (*stored.turns.get(previous, ()), *new)
    if not turns:
        raise ApiError(400, "input is empty", param="input")
    head = (Turn(role="system", content=instructions),) if instructions else ()
    fields.json_object("stream_options")
    options = Options(
        model=fields.model,
        max_tokens=fields.integer("max_output_tokens", 1, MAX_TOKENS),
        top_logprobs=0 if _LOGPROBS in fields.items("include") else None,
        stream=fields.flag("stream"),
    )
    request = Request(
        kind="responses",
        options=options,
        turns=head + turns,
        tools=declared_tools(fields),
        may_call=may_call(fields),
        fields={name: body.get(name) for name in _REPEATED} | {"instructions": instructions or None},
    )
    fields.end()
    return request


def turns_of(fields: Fields, known: Mapping[str, Json]) -> list[Turn]:
    """Return the turns in input items. A thought, a message and the calls after it are one turn of the assistant.

    Raises:
        ApiError: An item is invalid or not supported.
    """
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
            role, content = role_of(item, SPOKEN), text_of(item.value("content"), item.path("content"))
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
        "usage": _usage(num_prompt_tokens, answer.num_tokens),
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


def _usage(num_prompt_tokens: int, num_tokens: int) -> dict[str, Any]:
    return {
        "input_tokens": num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": num_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": num_prompt_tokens + num_tokens,
    }


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
    """Yield the events within an item."""
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

"""Responses: ``POST /v1/responses``. Turns and items of earlier responses are kept for the session."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rlcore.agents.wire.conversation import Answer, Json, Request, Turn
from rlcore.agents.wire.messages import declared_tools, function_call, json_list, json_object, plain_text, text_of
from rlcore.agents.wire.parameters import check_parameters, flag, may_call, optional_int
from rlcore.errors import shown
from rlcore.openai_api.errors import ApiError

READ = frozenset(
    {"input", "instructions", "previous_response_id", "model", "tools", "tool_choice"}
    | {"include", "stream", "stream_options", "max_output_tokens"}
)
_LOGPROBS = "message.output_text.logprobs"


@dataclass(frozen=True, slots=True)
class Stored:
    """Responses of a session: the turns up to each, without instructions, and the items of all."""

    turns: dict[str, tuple[Turn, ...]] = field(default_factory=dict)
    items: dict[str, Json] = field(default_factory=dict)

    def add(self, request: Request, answer: Answer, body: Json) -> None:
        """Store a response."""
        start = 1 if request.fields["instructions"] else 0
        self.turns[body["id"]] = (*request.turns[start:], answer.turn)
        self.items.update({item["id"]: item for item in body["output"]})


def read_responses(body: Json, stored: Stored) -> Request:
    """Return the request in a body.

    Raises:
        ApiError: A parameter is invalid or not supported, or the named response is not of this session.
    """
    check_parameters(body, READ)
    instructions = text_of(body.get("instructions"), "instructions")
    previous, found = plain_text(body.get("previous_response_id"), "previous_response_id"), body.get("input")
    if previous and previous not in stored.turns:
        what = f"previous_response_id {shown(previous, max_chars=80)} is no response of this episode"
        raise ApiError(400, what, code="previous_response_not_found", param="previous_response_id")
    items = [{"role": "user", "content": found}] if isinstance(found, str) else json_list(found, "input")
    turns = (*stored.turns.get(previous, ()), *turns_of(items, stored.items))
    if not turns:
        raise ApiError(400, "input is empty", param="input")
    head = (Turn(role="system", content=instructions),) if instructions else ()
    include = json_list(body.get("include"), "include")
    repeated = ("metadata", "max_output_tokens", "previous_response_id", "tools", "tool_choice", "reasoning")
    return Request(
        kind="responses",
        model=plain_text(body.get("model"), "model") or "policy",
        turns=head + turns,
        tools=declared_tools(body.get("tools")),
        may_call=may_call(body),
        max_tokens=optional_int(body, "max_output_tokens"),
        logprobs=_LOGPROBS in include,
        stream=flag(body, "stream"),
        fields={name: body.get(name) for name in repeated} | {"instructions": instructions or None},
    )


def turns_of(items: Sequence[Any], known: Mapping[str, Json]) -> list[Turn]:
    """Return the turns in input items. A thought, a message and the calls after it are one turn of the assistant.

    Raises:
        ApiError: An item is invalid or not supported.
    """
    turns: list[Turn] = []
    thought, is_open = "", False  # open: the last turn is the assistant's, and calls join it
    for number, raw in enumerate(items):
        param = f"input[{number}]"
        item = _resolved(json_object(raw, param), known, param)
        kind = plain_text(item.get("type"), f"{param}.type") or "message"
        if kind == "reasoning":
            thought, is_open = _thought(item, param), False
        elif kind == "function_call":
            call = function_call(item.get("name"), item.get("arguments"), item.get("call_id"), param)
            if not is_open:
                turns.append(Turn(role="assistant", thought=thought))
            turns[-1] = replace(turns[-1], calls=(*turns[-1].calls, call))
            thought, is_open = "", True
        elif kind == "function_call_output":
            output = text_of(item.get("output"), f"{param}.output")
            turns.append(Turn(role="tool", content=output, call_id=plain_text(item.get("call_id"), f"{param}.call_id")))
            is_open = False
        elif kind == "message":
            turn = _message(item, param)
            is_open = turn.role == "assistant"
            turns.append(replace(turn, thought=thought) if is_open else turn)
            thought = ""
        else:
            what = f"{param} has the type {shown(kind, max_chars=60)}: send messages, function calls and their outputs"
            raise ApiError(400, what, code="unsupported_item", param=param)
    return turns


def _resolved(item: Json, known: Mapping[str, Json], param: str) -> Json:
    if item.get("type") != "item_reference":
        return item
    name = plain_text(item.get("id"), f"{param}.id")
    if name not in known:
        what = f"{param} refers to '{shown(name, max_chars=80)}', which is no item of this episode"
        raise ApiError(400, what, code="item_not_found", param=param)
    return known[name]


def _message(item: Json, param: str) -> Turn:
    role = item.get("role")
    content = text_of(item.get("content"), f"{param}.content")
    if role in ("system", "developer"):
        return Turn(role="system", content=content)
    if role == "user" or role == "assistant":
        return Turn(role="user" if role == "user" else "assistant", content=content)
    what = f"{param}.role is {shown(role, max_chars=60)}, not one of system, developer, user, assistant"
    raise ApiError(400, what, param=f"{param}.role")


def _thought(item: Json, param: str) -> str:
    parts = [*json_list(item.get("content"), f"{param}.content"), *json_list(item.get("summary"), f"{param}.summary")]
    return "".join(plain_text(json_object(part, param).get("text"), f"{param}.text") for part in parts)


def responses_body(request: Request, answer: Answer, name: str) -> dict[str, Any]:
    """Return the body of the reply; ``name`` is its unique id."""
    fields, is_cut = request.fields, answer.finish == "length"
    return {
        "id": f"resp_{name}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "incomplete" if is_cut else "completed",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "model": request.model,
        "output": _output(answer, name, is_cut=is_cut, logprobs=request.logprobs),
        "usage": _usage(answer),
        "parallel_tool_calls": True,
        "text": {"format": {"type": "text"}},
        "truncation": "disabled",
        "store": True,
        **fields,
        "tools": fields["tools"] or [],
        "tool_choice": fields["tool_choice"] or "auto",
        "metadata": fields["metadata"] or {},
    }


def _output(answer: Answer, name: str, *, is_cut: bool, logprobs: bool) -> list[dict[str, Any]]:
    turn, status, items = answer.turn, "incomplete" if is_cut else "completed", []
    if turn.thought:
        content = [{"type": "reasoning_text", "text": turn.thought}]
        items.append({"type": "reasoning", "id": f"rs_{name}", "summary": [], "content": content, "status": status})
    if turn.content or not turn.calls:
        found = answer.logprobs if logprobs else []
        text = {"type": "output_text", "text": turn.content, "annotations": [], "logprobs": found}
        items.append({"type": "message", "id": f"msg_{name}", "role": "assistant", "status": status, "content": [text]})
    for number, call in enumerate(turn.calls):
        items.append(
            {
                "type": "function_call",
                "id": f"fc_{name}_{number}",
                "call_id": call.call_id,
                "name": call.name,
                "arguments": call.arguments,
                "status": status,
            }
        )
    return items


def _usage(answer: Answer) -> dict[str, Any]:
    return {
        "input_tokens": answer.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": len(answer.tokens),
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": answer.num_prompt_tokens + len(answer.tokens),
    }

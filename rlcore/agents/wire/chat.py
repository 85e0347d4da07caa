"""Chat completions: ``POST /v1/chat/completions``."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlcore.agents.wire.conversation import Answer, FunctionCall, Json, Request, Turn
from rlcore.agents.wire.messages import declared_tools, function_call, json_list, json_object, plain_text, text_of
from rlcore.agents.wire.parameters import check_parameters, flag, may_call, optional_int
from rlcore.errors import shown
from rlcore.openai_api.errors import ApiError
from rlcore.types import Role

READ = frozenset(
    {"messages", "model", "tools", "tool_choice", "n", "stop", "logprobs", "stream", "stream_options"}
    | {"max_tokens", "max_completion_tokens"}
)
_ROLES: Mapping[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
MAX_ANSWERS = 128  # of one request, as in OpenAI's API
MAX_STOPS, MAX_STOP_CHARS = 64, 1000


def read_chat(body: Json) -> Request:
    """Return the request in a body.

    Raises:
        ApiError: A parameter is invalid or not supported.
    """
    check_parameters(body, READ)
    messages = json_list(body.get("messages"), "messages")
    if not messages:
        raise ApiError(400, "messages is empty", param="messages")
    limits = [optional_int(body, name) for name in ("max_tokens", "max_completion_tokens")]
    return Request(
        kind="chat",
        model=plain_text(body.get("model"), "model") or "policy",
        turns=tuple(_turn(json_object(each, f"messages[{i}]"), f"messages[{i}]") for i, each in enumerate(messages)),
        tools=declared_tools(body.get("tools")),
        may_call=may_call(body),
        max_tokens=min((limit for limit in limits if limit), default=None),
        n=optional_int(body, "n", most=MAX_ANSWERS) or 1,
        stop=_stop(body.get("stop")),
        logprobs=flag(body, "logprobs"),
        stream=flag(body, "stream"),
        include_usage=flag(json_object(body.get("stream_options"), "stream_options"), "include_usage"),
    )


def _turn(message: Json, param: str) -> Turn:
    def text(*names: str) -> str:
        return next(filter(None, (plain_text(message.get(name), f"{param}.{name}") for name in names)), "")

    role = _ROLES.get(text("role"))
    if role is None:
        what = f"{param}.role is {shown(message.get('role'), max_chars=60)}, not one of {', '.join(_ROLES)}"
        raise ApiError(400, what, param=f"{param}.role")
    content = text_of(message.get("content"), f"{param}.content")
    if role == "tool":
        return Turn(role=role, content=content, call_id=text("tool_call_id", "name"))
    if role != "assistant":
        return Turn(role=role, content=content)
    calls = json_list(message.get("tool_calls"), f"{param}.tool_calls")
    return Turn(
        role=role,
        content=content or text("refusal"),
        thought=text("reasoning_content", "reasoning"),
        calls=tuple(_call(each, f"{param}.tool_calls[{number}]") for number, each in enumerate(calls)),
    )


def _call(call: object, param: str) -> FunctionCall:
    found = json_object(call, param)
    function = json_object(found.get("function"), f"{param}.function")
    return function_call(function.get("name"), function.get("arguments"), found.get("id"), f"{param}.function")


def _stop(value: object) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else json_list(value, "stop", most=MAX_STOPS)
    texts = tuple(plain_text(stop, f"stop[{number}]") for number, stop in enumerate(stops))
    if not all(0 < len(text) <= MAX_STOP_CHARS for text in texts):
        raise ApiError(400, f"stop must have texts of 1 to {MAX_STOP_CHARS} characters", param="stop")
    return texts


def chat_body(request: Request, answers: Sequence[Answer], name: str) -> dict[str, Any]:
    """Return the body of the reply; ``name`` is its unique id."""
    return {
        "id": f"chatcmpl-{name}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": request.model,
        "choices": [
            {
                "index": index,
                "message": _message(answer.turn),
                "finish_reason": answer.finish,
                "logprobs": {"content": answer.logprobs, "refusal": None} if request.logprobs else None,
            }
            for index, answer in enumerate(answers)
        ],
        "usage": _usage(answers),
    }


def _message(turn: Turn) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": turn.content, "refusal": None}
    if turn.thought:
        message["reasoning_content"] = turn.thought
    if turn.calls:
        message["content"] = turn.content or None
        message["tool_calls"] = [
            {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in turn.calls
        ]
    return message


def _usage(answers: Sequence[Answer]) -> dict[str, Any]:
    prompt, sampled = answers[0].num_prompt_tokens, sum(len(answer.tokens) for answer in answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def chat_events(body: Json, *, include_usage: bool) -> Iterator[tuple[str, Json | str]]:
    """Yield the reply as events (name, data) of a stream: per choice a role, thought, content, calls and an end."""
    shared = {key: body[key] for key in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    unused = {"usage": None} if include_usage else {}

    def chunk(choice: Json, delta: Json, **ends: Any) -> tuple[str, Json]:
        return "", shared | unused | {
            "choices": [{"index": choice["index"], "delta": delta, "finish_reason": None, "logprobs": None} | ends]
        }

    for choice in body["choices"]:
        message = choice["message"]
        yield chunk(choice, {"role": "assistant", "content": ""})
        if "reasoning_content" in message:
            yield chunk(choice, {"reasoning_content": message["reasoning_content"]})
        if message["content"] or choice["logprobs"]:
            yield chunk(choice, {"content": message["content"] or ""}, logprobs=choice["logprobs"])
        if "tool_calls" in message:
            calls = [{"index": index} | call for index, call in enumerate(message["tool_calls"])]
            yield chunk(choice, {"tool_calls": calls})
        yield chunk(choice, {}, finish_reason=choice["finish_reason"])
    if include_usage:
        yield "", shared | {"choices": [], "usage": body["usage"]}
    yield "", "[DONE]"

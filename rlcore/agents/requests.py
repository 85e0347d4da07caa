"""Requests of agents: conversations with tools, and the parameters that the run decides."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rlcore.environments.base import json_value
from rlcore.environments.call_arguments import declaration_errors
from rlcore.errors import shown
from rlcore.openai_api import requests as wire
from rlcore.openai_api.replies import FunctionCall
from rlcore.openai_api.requests import ApiError
from rlcore.types import Role

Kind = Literal["chat", "responses"]
MAX_TOOLS = 128  # of a request, as in OpenAI's API
_NO_ARGUMENTS: wire.Json = {"type": "object", "properties": {}}
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")

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
        may_call: False if the agent wants no calls, although it declares tools.
        fields: Parameters that a response repeats.
    """

    kind: Kind
    options: wire.Options
    turns: tuple[Turn, ...]
    tools: str = ""
    may_call: bool = True
    fields: wire.Json = field(default_factory=dict)


def read_chat(body: wire.Json) -> Request:
    """Return the request in a body of ``/v1/chat/completions``.

    Raises:
        ApiError: A parameter is invalid or not supported.
    """
    fields = wire.read_fields(body, OFFER)
    request = Request(
        kind="chat",
        options=wire.options_of(fields, is_chat=True),
        turns=tuple(_turn(role, content, message) for role, content, message in wire.chat_messages(fields, wire.ROLES)),
        tools=declared_tools(fields),
        may_call=may_call(fields),
    )
    fields.end()
    return request


def _turn(role: Role, content: str, message: wire.Fields) -> Turn:
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


def declared_tools(fields: wire.Fields) -> str:
    """Return the tools of a request to either API as a JSON list in the form of chat completions; "" without any.

    Raises:
        ApiError: A tool is built in, or is no valid function.
    """
    found = [_declared(tool, tool.where) for tool in fields.objects("tools", MAX_TOOLS)]
    return json.dumps(found, ensure_ascii=False) if found else ""


def _declared(tool: wire.Fields, param: str) -> dict[str, Any]:
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


def may_call(fields: wire.Fields) -> bool:
    """Return False for ``tool_choice = "none"``.

    A call that is required, or of a certain tool, cannot be enforced on the policy, so such a choice is ``auto``.

    Raises:
        ApiError: It is no choice of OpenAI's API.
    """
    value = fields.value("tool_choice")
    kind = value.get("type") if isinstance(value, Mapping) else None
    if value not in (None, "auto", "none", "required") and kind not in ("function", "allowed_tools"):
        what = f"tool_choice must be auto, none, required or a function, not {shown(value, max_chars=60)}"
        raise ApiError(400, what, code="unsupported_parameter", param="tool_choice")
    return bool(value != "none")

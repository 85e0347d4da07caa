"""Parts of a request that both APIs share: texts, calls and declarations of tools."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rlcore.agents.wire.conversation import ApiError, FunctionCall, Json
from rlcore.environments.base import json_value
from rlcore.errors import shown

_TEXTS = ("text", "input_text", "output_text")
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")


def json_object(value: object, param: str) -> Json:
    """Return a JSON object.

    Raises:
        ApiError: It is something else.
    """
    if not isinstance(value, Mapping):
        raise ApiError(400, f"{param} must be an object, not {shown(value, max_chars=60)}", param=param)
    return value


def json_list(value: object, param: str) -> Sequence[Any]:
    """Return a JSON list.

    Raises:
        ApiError: It is something else.
    """
    if not isinstance(value, list):
        raise ApiError(400, f"{param} must be a list, not {shown(value, max_chars=60)}", param=param)
    return value


def text_of(content: object, param: str) -> str:
    """Return the text of a message, which may be a list of parts or absent.

    Raises:
        ApiError: It has a part that is no text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(_part(part, f"{param}[{number}]") for number, part in enumerate(json_list(content, param)))


def _part(part: object, param: str) -> str:
    if isinstance(part, str):
        return part
    kind = json_object(part, param).get("type")
    field = "refusal" if kind == "refusal" else "text"
    text = part.get(field) if isinstance(part, Mapping) else None
    if kind not in (*_TEXTS, "refusal"):
        what = f"{param} has the type {shown(kind, max_chars=60)}: the policy reads text only, so send its text"
        raise ApiError(400, what, code="unsupported_content", param=param)
    if not isinstance(text, str):
        raise ApiError(400, f"{param}.{field} must be a text", param=param)
    return text


def function_call(name: object, arguments: object, call_id: object, param: str) -> FunctionCall:
    """Return a call in the history.

    Raises:
        ApiError: It has no name, or arguments that are no JSON object.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ApiError(400, f"{param} has no valid name: {shown(name, max_chars=60)}", param=param)
    try:
        found = json_value(arguments or "{}") if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        what = f"{param}.arguments must be a JSON object as text, not {shown(arguments, max_chars=60)}"
        raise ApiError(400, what, param=param)
    return FunctionCall(name=name, arguments=arguments_text(found), call_id=call_id if isinstance(call_id, str) else "")


def arguments_text(arguments: Json) -> str:
    """Return the arguments of a call as JSON, as agents receive them."""
    return json.dumps(arguments, ensure_ascii=False)


def declared_tools(tools: object) -> str:
    """Return declarations of both APIs as a JSON list in the form of chat completions; "" if there are none.

    Raises:
        ApiError: A tool is built in, or is no valid function.
    """
    if tools is None or tools == []:
        return ""
    found = [
        _declared(json_object(tool, f"tools[{i}]"), f"tools[{i}]") for i, tool in enumerate(json_list(tools, "tools"))
    ]
    return json.dumps(found, ensure_ascii=False)


def _declared(tool: Json, param: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        what = (
            f"{param} has the type {shown(tool.get('type'), max_chars=60)}: there are no built-in tools, only functions"
        )
        raise ApiError(400, what, code="unsupported_tool", param=param)
    function = json_object(tool.get("function", tool), param)
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ApiError(400, f"{param} has no valid name: {shown(name, max_chars=60)}", param=param)
    if not isinstance(function.get("description") or "", str):
        raise ApiError(400, f"{param}.description must be a text", param=param)
    schema = json_object(parameters or {"type": "object", "properties": {}}, f"{param}.parameters")
    description = {"description": function["description"]} if function.get("description") else {}
    return {"type": "function", "function": {"name": name, **description, "parameters": schema}}

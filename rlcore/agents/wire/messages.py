"""Values of a request, each read as one type, and the parts that both APIs share: texts, calls, declared tools."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rlcore.agents.wire.conversation import FunctionCall, Json
from rlcore.environments.base import json_value
from rlcore.environments.call_arguments import declaration_errors
from rlcore.errors import shown
from rlcore.openai_api.errors import ApiError

MAX_ITEMS = 4096  # of a list
MAX_TOOLS = 128  # of a request, as in OpenAI's API
_NO_ARGUMENTS: Json = {"type": "object", "properties": {}}
_TEXTS = ("text", "input_text", "output_text")
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")


def wrong_type(value: object, param: str, wanted: str) -> ApiError:
    """Return the error of a value that is not ``wanted``."""
    return ApiError(400, f"{param} must be {wanted}, not {shown(value, max_chars=60)}", param=param)


def json_object(value: object, param: str) -> Json:
    """Return a JSON object, empty if absent.

    Raises:
        ApiError: It is something else.
    """
    if value is not None and not isinstance(value, Mapping):
        raise wrong_type(value, param, "an object")
    return value or {}


def json_list(value: object, param: str, *, most: int = MAX_ITEMS) -> Sequence[Any]:
    """Return a JSON list, empty if absent.

    Raises:
        ApiError: It is something else, or too long.
    """
    if value is not None and not isinstance(value, list):
        raise wrong_type(value, param, "a list")
    if value and len(value) > most:
        raise ApiError(400, f"{param} has {len(value)} entries, and the limit is {most}", param=param)
    return value or []


def plain_text(value: object, param: str) -> str:
    """Return a text, "" if absent.

    Raises:
        ApiError: It is something else.
    """
    if value is not None and not isinstance(value, str):
        raise wrong_type(value, param, "a text")
    return value or ""


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
    found = json_object(part, param)
    kind = found.get("type")
    if kind not in (*_TEXTS, "refusal"):
        what = f"{param} has the type {shown(kind, max_chars=60)}: the policy reads text only, so send its text"
        raise ApiError(400, what, code="unsupported_content", param=param)
    field = "refusal" if kind == "refusal" else "text"
    text = found.get(field)
    if not isinstance(text, str):
        raise wrong_type(text, f"{param}.{field}", "a text")
    return text


def function_call(name: object, arguments: object, call_id: object, param: str) -> FunctionCall:
    """Return a call. The gateway hands out what this function accepts, and nothing else.

    Raises:
        ApiError: The call has no valid name, arguments that are no JSON object, or an id that is no text.
    """
    try:
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        found = json_value(text or "{}")
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise wrong_type(arguments, f"{param}.arguments", "a JSON object as text")
    written = json.dumps(found, ensure_ascii=False)
    return FunctionCall(name=_name(name, param), arguments=written, call_id=plain_text(call_id, f"{param}.id"))


def _name(name: object, param: str) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        what = f"{param} has no valid name, 1 to 128 of A-Z a-z 0-9 _ . : / -, but '{shown(name, max_chars=60)}'"
        raise ApiError(400, what, param=param)
    return name


def declared_tools(tools: object) -> str:
    """Return declarations of both APIs as a JSON list in the form of chat completions; "" if there are none.

    Raises:
        ApiError: A tool is built in, or is no valid function.
    """
    listed = json_list(tools, "tools", most=MAX_TOOLS)
    found = [_declared(json_object(tool, f"tools[{i}]"), f"tools[{i}]") for i, tool in enumerate(listed)]
    return json.dumps(found, ensure_ascii=False) if found else ""


def _declared(tool: Json, param: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        kind = shown(tool.get("type"), max_chars=60)
        what = f"{param} has the type {kind}: there are no built-in tools, only functions"
        raise ApiError(400, what, code="unsupported_tool", param=param)
    function = json_object(tool.get("function", tool), param)
    own: dict[str, Any] = {
        "name": _name(function.get("name"), param),
        "description": plain_text(function.get("description"), f"{param}.description"),
        "parameters": json_object(function.get("parameters"), f"{param}.parameters") or _NO_ARGUMENTS,
    }
    if errors := declaration_errors(own["name"], {"function": own}):
        raise ApiError(400, shown(f"{param}: {errors[0]}"), param=param)
    return {"type": "function", "function": {key: value for key, value in own.items() if value}}

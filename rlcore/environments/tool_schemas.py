"""Schema of a text tool for chat templates that declare tools: one text argument."""

from __future__ import annotations

import inspect
from typing import Any

from rlcore.environments.base import ParsedCall, Tool, ToolOutput, error_output

ARGUMENT = "argument"


def tool_schema(tool: Tool) -> dict[str, Any]:
    """Return the tool's JSON schema. The description is the tool's ``describes``, or its class's docstring."""
    words = getattr(tool, "describes", "") or inspect.getdoc(type(tool)) or tool.name
    argument = {"type": "string", "description": "What the tool is given, as plain text."}
    parameters = {"type": "object", "properties": {ARGUMENT: argument}, "required": [ARGUMENT]}
    return {"type": "function", "function": {"name": tool.name, "description": words, "parameters": parameters}}


def text_argument(call: ParsedCall) -> str | ToolOutput:
    """Return the text argument of a call, or the error of the call."""
    if call.arguments is None:
        return call.argument
    text = call.arguments.get(ARGUMENT)
    if set(call.arguments) != {ARGUMENT} or not isinstance(text, str):
        return error_output(f"{call.tool}: the arguments are a JSON object with one text, {ARGUMENT!r}")
    return text

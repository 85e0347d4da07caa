"""What a tool of text looks like to a model whose chat template declares tools: one argument, a text."""

from __future__ import annotations

import inspect
from typing import Any

from rlcore.environments.base import ParsedCall, Tool, ToolOutput, error_output

ARGUMENT = "argument"


def tool_schema(tool: Tool) -> dict[str, Any]:
    """Its JSON schema. The description is the tool's ``describes``, or else its class's docstring."""
    words = getattr(tool, "describes", "") or inspect.getdoc(type(tool)) or tool.name
    argument = {"type": "string", "description": "What the tool is given, as plain text."}
    parameters = {"type": "object", "properties": {ARGUMENT: argument}, "required": [ARGUMENT]}
    return {"type": "function", "function": {"name": tool.name, "description": words, "parameters": parameters}}


def text_argument(call: ParsedCall) -> str | ToolOutput:
    """The text that a call gives such a tool, or what is wrong with the call."""
    if call.arguments is None:
        return call.argument
    text = call.arguments.get(ARGUMENT)
    if set(call.arguments) != {ARGUMENT} or not isinstance(text, str):
        return error_output(f"{call.tool}: the arguments are a JSON object with one text, {ARGUMENT!r}")
    return text

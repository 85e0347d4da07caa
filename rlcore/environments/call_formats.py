"""Formats of tool calls: those of chat templates, and rlcore's for other models.

    hermes   <tool_call>{"name": "guess", "arguments": {"number": 5}}</tool_call>          Hermes, Qwen
    llama3   {"name": "guess", "parameters": {"number": 5}}                                Llama 3.1 and later
    mistral  [TOOL_CALLS] [{"name": "guess", "arguments": {"number": 5}, "id": "abcdefghi"}]
    ours     <tool:guess>5</tool>                                                          other models

A turn holds one call. A turn without a call is the answer, and ends the episode.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from rlcore.environments.base import ParsedCall, json_value, parse_call

_HERMES, _HERMES_END = "<tool_call>", "</tool_call>"
_MISTRAL = "[TOOL_CALLS]"
_PYTHON_TAG = "<|python_tag|>"
_NAMED = re.compile(r"\s*([A-Za-z_]\w*)\s*+(?:\[ARGS\]\s*+)?(\{.*)\Z", re.DOTALL)  # Mistral's, from version 11 on


@dataclass(frozen=True, kw_only=True, slots=True)
class CallFormat:
    """Format of a call.

    Attributes:
        parse: Returns the call of a turn, or None if the turn is an answer.
        mark: Text that identifies the format in a chat template; empty for rlcore's format.
    """

    name: str
    parse: Callable[[str], ParsedCall | None]
    mark: str = ""

    @property
    def is_of_model(self) -> bool:
        """True for a model's format, False for rlcore's."""
        return bool(self.mark)


def parse_hermes(turn: str) -> ParsedCall | None:
    """Parse ``<tool_call>{"name": …, "arguments": {…}}</tool_call>`` after text and thinking."""
    call = turn.rpartition("</think>")[2]
    _, opening, after = call.partition(_HERMES)
    if not opening:
        return None
    inside, closing, _ = after.partition(_HERMES_END)
    if not closing or _HERMES in after:
        return ParsedCall(error="a turn has one call, <tool_call>{...}</tool_call>")
    return _call(inside, "arguments")


def parse_llama3(turn: str) -> ParsedCall | None:
    """Parse a turn that is one JSON object with a ``name``, optionally after a python tag."""
    call = turn.strip()
    is_tagged = call.startswith(_PYTHON_TAG)
    call = call.removeprefix(_PYTHON_TAG).strip()
    if not is_tagged and not (call.startswith("{") and '"name"' in call):
        return None
    return _call(call, "parameters")


def parse_mistral(turn: str) -> ParsedCall | None:
    """Parse ``[TOOL_CALLS]`` and a JSON list with one call, or ``name{…}`` of later versions."""
    if _MISTRAL not in turn:
        return None
    _, _, call = turn.partition(_MISTRAL)
    if named := _NAMED.match(call):
        arguments = _json(named.group(2))
        return _with_arguments(named.group(1), arguments, "")
    return _call(call, "arguments")


FORMATS: Mapping[str, CallFormat] = MappingProxyType(
    {
        "hermes": CallFormat(name="hermes", parse=parse_hermes, mark=_HERMES),
        "llama3": CallFormat(name="llama3", parse=parse_llama3, mark="ipython"),
        "mistral": CallFormat(name="mistral", parse=parse_mistral, mark=_MISTRAL),
        "ours": CallFormat(name="ours", parse=parse_call),
    }
)
_XML = "<function="  # XML inside of <tool_call>, which is not supported


def format_of(template: str, wanted: str = "template") -> CallFormat:
    """Return the format ``wanted``; ``template`` means the format in the chat template, else rlcore's."""
    if wanted != "template":
        return FORMATS[wanted]
    if _XML in template:
        return FORMATS["ours"]
    return next((each for each in FORMATS.values() if each.mark and each.mark in template), FORMATS["ours"])


def _call(text: str, key: str) -> ParsedCall:
    """Parse a call from JSON, whose arguments have the key ``key``."""
    found = _json(text)
    if isinstance(found, list):
        if len(found) != 1:
            return ParsedCall(error="a turn has one call")
        found = found[0]
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return ParsedCall(error=f'a call is JSON: {{"name": "...", "{key}": {{...}}}}')
    return _with_arguments(found["name"], found.get(key, {}), found.get("id", ""))


def _with_arguments(name: str, arguments: Any, call_id: Any) -> ParsedCall:
    if not isinstance(arguments, dict):
        return ParsedCall(error="the arguments of a call are a JSON object")
    return ParsedCall(tool=name, arguments=arguments, call_id=call_id if isinstance(call_id, str) else "")


def _json(text: str) -> Any:
    """Parse JSON; None if malformed."""
    try:
        return json_value(text)
    except (ValueError, RecursionError):
        return None

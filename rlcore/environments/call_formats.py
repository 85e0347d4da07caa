"""How a model writes a call: in a format that its chat template teaches, or in ours.

    hermes   <tool_call>{"name": "guess", "arguments": {"number": 5}}</tool_call>          Hermes, Qwen
    llama3   {"name": "guess", "parameters": {"number": 5}}                                Llama 3.1 and later
    mistral  [TOOL_CALLS] [{"name": "guess", "arguments": {"number": 5}, "id": "abcdefghi"}]
    ours     <tool:guess>5</tool>                                                          models without any

A turn holds one call. A turn that is no call is the answer, and ends the episode.
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
    """A format. ``mark``: what it is known by in a chat template. ``is_own``: it is a model's, and no format of ours.

    ``parse``: the call of a turn; None where the turn is an answer.
    """

    name: str
    parse: Callable[[str], ParsedCall | None]
    mark: str = ""

    @property
    def is_own(self) -> bool:
        return bool(self.mark)


def parse_hermes(turn: str) -> ParsedCall | None:
    """``<tool_call>{"name": …, "arguments": {…}}</tool_call>``, after any words and any thoughts."""
    said = turn.rpartition("</think>")[2]
    _, opening, after = said.partition(_HERMES)
    if not opening:
        return None
    inside, closing, _ = after.partition(_HERMES_END)
    if not closing or _HERMES in after:
        return ParsedCall(error="a turn has one call, <tool_call>{...}</tool_call>")
    return _call(inside, "arguments")


def parse_llama3(turn: str) -> ParsedCall | None:
    """A turn that is one JSON object with a ``name``, after a python tag or not."""
    said = turn.strip()
    is_tagged = said.startswith(_PYTHON_TAG)
    said = said.removeprefix(_PYTHON_TAG).strip()
    if not is_tagged and not (said.startswith("{") and '"name"' in said):
        return None
    return _call(said, "parameters")


def parse_mistral(turn: str) -> ParsedCall | None:
    """``[TOOL_CALLS]`` and a JSON list with one call, or ``name{…}`` as later versions write it."""
    if _MISTRAL not in turn:
        return None
    _, _, said = turn.partition(_MISTRAL)
    if named := _NAMED.match(said):
        arguments = _json(named.group(2))
        return _with_arguments(named.group(1), arguments, "")
    return _call(said, "arguments")


FORMATS: Mapping[str, CallFormat] = MappingProxyType(
    {
        "hermes": CallFormat(name="hermes", parse=parse_hermes, mark=_HERMES),
        "llama3": CallFormat(name="llama3", parse=parse_llama3, mark="ipython"),
        "mistral": CallFormat(name="mistral", parse=parse_mistral, mark=_MISTRAL),
        "ours": CallFormat(name="ours", parse=parse_call),
    }
)
_XML = "<function="  # a format of XML inside of <tool_call>, which nothing here reads


def format_of(template: str, wanted: str = "template") -> CallFormat:
    """The format ``wanted``; ``template``: the one whose mark is in the chat template, ours where none is."""
    if wanted != "template":
        return FORMATS[wanted]
    if _XML in template:
        return FORMATS["ours"]
    return next((each for each in FORMATS.values() if each.mark and each.mark in template), FORMATS["ours"])


def _call(text: str, key: str) -> ParsedCall:
    """A call from its JSON; ``key``: of its arguments."""
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
    """A JSON value; None where it is none."""
    try:
        return json_value(text)
    except (ValueError, RecursionError):
        return None

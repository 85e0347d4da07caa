"""Formats of tool calls: those of chat templates, and rlcore's for other models.

    hermes   <tool_call>{"name": "guess", "arguments": {"number": 5}}</tool_call>          Hermes, Qwen
    llama3   {"name": "guess", "parameters": {"number": 5}}                                Llama 3.1 and later
    mistral  [TOOL_CALLS] [{"name": "guess", "arguments": {"number": 5}, "id": "abcdefghi"}]
    ours     <tool:guess>5</tool>                                                          other models

An episode's turn holds one call, an agent's may hold several. A turn without a call is the answer, and ends the
episode. Calls begin at the first opening outside of a thought. JSON decides where a call ends: an argument may contain
``</tool_call>``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from rlcore.environments.base import OPENING, ParsedCall, json_prefix, parse_call

_HERMES = "<tool_call>"
_HERMES_END = re.compile(r"\s*</tool_call>")
_MISTRAL = "[TOOL_CALLS]"
_NAMED = re.compile(r"\s*([A-Za-z_]\w*)\s*+(?:\[ARGS\]\s*+)?(?=\{)")  # Mistral's, from version 11 on
_NEXT = re.compile(r"\s*+(?=\[TOOL_CALLS\]|\Z)")
_PYTHON_TAG = "<|python_tag|>"
_THOUGHT = re.compile(r"\s*<think>(.*?)(?:</think>\s*|\Z)", re.DOTALL)


@dataclass(frozen=True, kw_only=True, slots=True)
class CallFormat:
    """Format of a call.

    Attributes:
        opening: Regular expression of the beginning of a call.
        read: Returns the calls in a text. A malformed one is an error.
        mark: Text that identifies the format in a chat template; empty for rlcore's format.
    """

    name: str
    opening: str
    read: Callable[[str], list[ParsedCall]]
    mark: str = ""

    @property
    def is_of_model(self) -> bool:
        """True for a model's format, False for rlcore's."""
        return bool(self.mark)

    def calls(self, text: str) -> tuple[str, list[ParsedCall]]:
        """Return the text before the first call, and the calls. Thoughts before the first call hold no call."""
        start = end = 0
        for found in re.finditer(rf"<think>.*?(?:</think>|\Z)|({self.opening})", text, re.DOTALL):
            end = found.start()
            if found.group(1) is not None:
                break
            start = end = found.end()
        calls = self.read(text[start:])
        return text[:end] if calls else text, calls

    def parse(self, turn: str) -> ParsedCall | None:
        """Return the call of an episode's turn, or None if the turn is an answer."""
        _, calls = self.calls(turn)
        return ParsedCall(error="a turn has one call") if len(calls) > 1 else next(iter(calls), None)


def split_thought(text: str) -> tuple[str, str]:
    """Return the thought at the start of a text, and the rest. A thought without an end is all of the text."""
    found = _THOUGHT.match(text)
    return (found.group(1).strip(), text[found.end() :]) if found else ("", text)


def _read_hermes(text: str) -> list[ParsedCall]:
    """Read ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``, once or more."""
    calls: list[ParsedCall] = []
    start = text.find(_HERMES)
    while start >= 0:
        value, end = _json(text, start + len(_HERMES))
        closing = _HERMES_END.match(text, end)
        calls.append(_call(value, "arguments") if closing or value is None else _unended("</tool_call>"))
        start = text.find(_HERMES, closing.end()) if closing else -1
    return calls


def _read_llama3(text: str) -> list[ParsedCall]:
    """Read a text that is one JSON object with a ``name``, optionally after a python tag."""
    text = text.strip()
    call = text.removeprefix(_PYTHON_TAG)
    if call == text and not (call.startswith("{") and '"name"' in call):
        return []
    value, end = _json(call, 0)
    return [_call(value, "parameters") if end == len(call) else _unended("the turn")]


def _read_mistral(text: str) -> list[ParsedCall]:
    """Read ``[TOOL_CALLS]`` and a JSON list of calls, or ``name{…}`` of later versions, once or more."""
    calls: list[ParsedCall] = []
    start = text.find(_MISTRAL)
    while 0 <= start < len(text):
        named = _NAMED.match(text, start + len(_MISTRAL))
        value, end = _json(text, named.end() if named else start + len(_MISTRAL))
        if named:
            calls.append(_with_arguments(named.group(1), value, ""))
        else:
            calls += [_call(each, "arguments") for each in (value if value and isinstance(value, list) else [value])]
        following = _NEXT.match(text, end)
        if not following:
            calls.append(_unended("the turn"))
        start = following.end() if following else -1
    return calls


def _read_ours(text: str) -> list[ParsedCall]:
    call = parse_call(text)
    return [call] if call else []


FORMATS: Mapping[str, CallFormat] = MappingProxyType(
    {
        "hermes": CallFormat(name="hermes", opening=_HERMES, read=_read_hermes, mark=_HERMES),
        "llama3": CallFormat(name="llama3", opening=r"<\|python_tag\|>|\{", read=_read_llama3, mark="ipython"),
        "mistral": CallFormat(name="mistral", opening=re.escape(_MISTRAL), read=_read_mistral, mark=_MISTRAL),
        "ours": CallFormat(name="ours", opening=OPENING.pattern, read=_read_ours),
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


def _json(text: str, start: int) -> tuple[Any, int]:
    """Return the JSON value that begins at ``start``, and the position after the value; (None, end) if malformed."""
    try:
        return json_prefix(text, start)
    except ValueError:
        return None, len(text)


def _call(found: Any, key: str) -> ParsedCall:
    """Return a call whose arguments have the key ``key``."""
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return ParsedCall(error=f'a call is JSON: {{"name": "...", "{key}": {{...}}}}')
    return _with_arguments(found["name"], found.get(key, {}), found.get("id", ""))


def _with_arguments(name: str, arguments: Any, call_id: Any) -> ParsedCall:
    if not isinstance(arguments, dict):
        return ParsedCall(error="the arguments of a call are a JSON object")
    return ParsedCall(tool=name, arguments=arguments, call_id=call_id if isinstance(call_id, str) else "")


def _unended(end: str) -> ParsedCall:
    return ParsedCall(error=f"after the JSON of a call comes {end}")

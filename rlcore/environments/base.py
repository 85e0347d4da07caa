"""Tool protocol (batched text in, text out), and the formats of tool calls: of chat templates, and rlcore's for others.

    hermes   <tool_call>{"name": "guess", "arguments": {"number": 5}}</tool_call>          Hermes, Qwen
    llama3   {"name": "guess", "parameters": {"number": 5}}                                Llama 3.1 and later
    mistral  [TOOL_CALLS] [{"name": "guess", "arguments": {"number": 5}, "id": "abcdefghi"}]
    ours     <tool:guess>5</tool>                                                          other models

An episode's turn holds one call, in rlcore's format at its end and with an unescaped argument; an agent's may hold
several. A turn without a call is the answer, and ends the episode. Calls begin at the first opening outside of a
thought. JSON decides where a call ends: an argument may contain ``</tool_call>``. Errors of the policy (a malformed
call, an unknown tool, a division by zero) are returned to it as text that begins with ``error:``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

OPENING = re.compile(r"<tool:([A-Za-z_][A-Za-z0-9_]{0,63})>")
CLOSING = "</tool>"
MAX_DEPTH = 64  # of JSON
_DECODER, _BLANKS = json.JSONDecoder(), re.compile(r"[ \t\n\r]*")
_HERMES = "<tool_call>"
_HERMES_END = re.compile(r"\s*</tool_call>")
_MISTRAL = "[TOOL_CALLS]"
_NAMED = re.compile(r"\s*([A-Za-z_]\w*)\s*+(?:\[ARGS\]\s*+)?(?=\{)")  # Mistral's, from version 11 on
_NEXT = re.compile(r"\s*+(?=\[TOOL_CALLS\]|\Z)")
_XML = "<function="  # XML inside of <tool_call>, which is not supported
_PYTHON_TAG = "<|python_tag|>"
_THOUGHT = re.compile(r"\s*<think>(.*?)(?:</think>\s*|\Z)", re.DOTALL)


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolOutput:
    """Text for the policy. ``is_error``: it reports an error of the call."""

    text: str
    is_error: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolFailure:
    """Failure of the tool, not of the call. The episode fails and is not trained on."""

    reason: str


class CallError(Exception):
    """Error of a call, which an environment's method raises and the policy reads.

    Any other exception is an error of the environment and fails the rollout.
    """


class Tool(Protocol):
    """Tool that answers calls. Equal arguments have equal answers, whatever else is in the batch."""

    @property
    def name(self) -> str: ...

    def __call__(self, arguments: Sequence[str]) -> list[ToolOutput | ToolFailure]:
        """Return one answer per argument, in order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedCall:
    """Call as written. If it cannot be run, ``error`` has the reason and ``tool`` is empty.

    Attributes:
        argument: Text argument, if the format has no named arguments.
        arguments: Named arguments, if the format has them.
        call_id: The policy's id of the call, in formats that have one.
    """

    tool: str = ""
    argument: str = ""
    error: str = ""
    arguments: Mapping[str, Any] | None = None
    call_id: str = ""


def parse_call(turn: str) -> ParsedCall | None:
    """Return the call at the end of a turn in rlcore's format; None if the turn is the answer."""
    text = turn.rstrip()
    if not text.endswith(CLOSING):
        return None
    body = text[: -len(CLOSING)]
    openings = list(OPENING.finditer(body))
    if len(openings) != 1 or CLOSING in body:
        return ParsedCall(error="a turn ends in one call, <tool:name>argument</tool>")
    return ParsedCall(tool=openings[0].group(1), argument=body[openings[0].end() :].strip())


def error_output(what: str) -> ToolOutput:
    """Return an error message for the policy."""
    return ToolOutput(text=f"error: {what}", is_error=True)


def json_value(text: str) -> Any:
    """Parse JSON written by a policy or an agent.

    Raises:
        ValueError: It is malformed, or as :func:`require_json`.
    """
    value, end = json_prefix(text, 0)
    if text[end:].strip():
        raise ValueError(f"there is more text after the JSON value, at character {end}")
    return value


def json_prefix(text: str, start: int) -> tuple[Any, int]:
    """Return the JSON value that begins at ``start``, perhaps after blanks, and the position after the value.

    Raises:
        ValueError: As :func:`json_value`.
    """
    blanks = _BLANKS.match(text, start)
    try:
        value, end = _DECODER.raw_decode(text, blanks.end() if blanks else start)
    except RecursionError as error:
        raise ValueError(f"it is nested more than {MAX_DEPTH} deep") from error
    return require_json(value), end


def require_json(value: Any) -> Any:
    r"""Return a value that every reader of JSON accepts.

    Raises:
        ValueError: It has NaN or infinity, which are no JSON, half of a surrogate pair (``"\ud800"``), which tokenizers
            and tables reject, or is nested more than 64 deep.
    """
    layer = [value]
    for _ in range(MAX_DEPTH):
        layer = [each for outer in layer for each in _inner(outer)]
        if not layer:
            json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
            return value
    raise ValueError(f"it is nested more than {MAX_DEPTH} deep")


def _inner(value: Any) -> Collection[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


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


FORMATS: Mapping[str, CallFormat] = MappingProxyType(
    {
        "hermes": CallFormat(name="hermes", opening=_HERMES, read=_read_hermes, mark=_HERMES),
        "llama3": CallFormat(name="llama3", opening=r"<\|python_tag\|>|\{", read=_read_llama3, mark="ipython"),
        "mistral": CallFormat(name="mistral", opening=re.escape(_MISTRAL), read=_read_mistral, mark=_MISTRAL),
        "ours": CallFormat(
            name="ours", opening=OPENING.pattern, read=lambda text: list(filter(None, [parse_call(text)]))
        ),
    }
)


def format_of(template: str, wanted: str = "template") -> CallFormat:
    """Return the format ``wanted``; ``template`` means the format in the chat template, else rlcore's."""
    if wanted != "template":
        return FORMATS[wanted]
    if _XML in template:
        return FORMATS["ours"]
    return next((each for each in FORMATS.values() if each.mark and each.mark in template), FORMATS["ours"])


def _json(text: str, start: int) -> tuple[Any, int]:
    try:
        return json_prefix(text, start)
    except ValueError:
        return None, len(text)


def _call(found: Any, key: str) -> ParsedCall:
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return ParsedCall(error=f'a call is JSON: {{"name": "...", "{key}": {{...}}}}')
    return _with_arguments(found["name"], found.get(key, {}), found.get("id", ""))


def _with_arguments(name: str, arguments: Any, call_id: Any) -> ParsedCall:
    if not isinstance(arguments, dict):
        return ParsedCall(error="the arguments of a call are a JSON object")
    return ParsedCall(tool=name, arguments=arguments, call_id=call_id if isinstance(call_id, str) else "")


def _unended(end: str) -> ParsedCall:
    return ParsedCall(error=f"after the JSON of a call comes {end}")

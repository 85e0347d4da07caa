"""Tool protocol (batched text in, text out), and the format in which the policy writes a call.

A turn that ends in ``</tool>`` is a call. It has exactly one call, at its end:

    I had better compute that.
    <tool:calculator>12*(3+4)</tool>

The argument is everything between the tags, unescaped. Errors of the policy (a malformed call, an unknown tool, a
division by zero) are returned to it as text that begins with ``error:``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

OPENING = re.compile(r"<tool:([A-Za-z_][A-Za-z0-9_]{0,63})>")
CLOSING = "</tool>"
MAX_DEPTH = 64  # of JSON
_DECODER, _BLANKS = json.JSONDecoder(), re.compile(r"[ \t\n\r]*")


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
        ...


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
    """Return the call at the end of a turn; None if the turn does not end in ``</tool>`` and is the answer.

    ``parse_call("<tool:calculator>3+4</tool>")`` is ``ParsedCall(tool="calculator", argument="3+4")``.
    """
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

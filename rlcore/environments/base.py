"""What a tool is: text in, text out, many calls at once; and how the policy writes a call.

A turn that ends in ``</tool>`` is a call. It holds exactly one, at its end:

    I had better compute that.
    <tool:calculator>12*(3+4)</tool>

The argument is everything between the marks, as it stands: a program needs no escaping. What the policy gets wrong (a
malformed call, an unknown tool, a division by zero) comes back to it as text that begins with ``error:``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

OPENING = re.compile(r"<tool:([A-Za-z_][A-Za-z0-9_]{0,63})>")
CLOSING = "</tool>"


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolOutput:
    """What the policy is told. ``is_error``: an error message about its call."""

    text: str
    is_error: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolFailure:
    """The tool itself failed, not the call: the episode fails, and is not trained on."""

    reason: str


class CallError(Exception):
    """Raised by a method of an environment: the call is wrong, and the policy is told why.

    Any other exception is a error of the environment, which fails the rollout.
    """


class Tool(Protocol):
    """Answers calls. The same argument has the same answer, whatever else is asked at the same time."""

    @property
    def name(self) -> str: ...

    def __call__(self, arguments: Sequence[str]) -> list[ToolOutput | ToolFailure]:
        """One answer per argument, in their order."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedCall:
    """A call as it was written; ``error`` says why it is none that can be run (then ``tool`` is empty).

    What the tool is given is ``arguments`` by name where the format writes them so, else the text ``argument``.
    ``call_id``: what the policy calls its call, in formats that have such a name.
    """

    tool: str = ""
    argument: str = ""
    error: str = ""
    arguments: Mapping[str, Any] | None = None
    call_id: str = ""


def parse_call(turn: str) -> ParsedCall | None:
    """The call that a turn ends in; None for a turn that does not end in ``</tool>``, which is an answer.

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
    """An error message for the policy."""
    return ToolOutput(text=f"error: {what}", is_error=True)


def json_value(text: str) -> Any:
    r"""The JSON value that a policy has written.

    Raises:
        ValueError: it is none, or holds half of a surrogate pair (``"\ud800"``), which no tokenizer or table takes.
        RecursionError: it is nested too deeply.
    """
    value = json.loads(text)
    json.dumps(value, ensure_ascii=False).encode()
    return value

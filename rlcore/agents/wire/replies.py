"""Text of a sampled turn as the agent sees it: thought, content and calls."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlcore.agents.wire.conversation import FunctionCall, Turn
from rlcore.agents.wire.messages import arguments_text
from rlcore.environments.base import OPENING, ParsedCall, json_value
from rlcore.environments.call_arguments import arguments_of
from rlcore.environments.call_formats import CallFormat

_THOUGHT = re.compile(r"\s*<think>(.*?)(?:</think>\s*|\Z)", re.DOTALL)
_BLOCK = re.compile(r"<tool_call>.*?(?:</tool_call>|\Z)", re.DOTALL)
_MISTRAL = "[TOOL_CALLS]"
Schemas = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplyReader:
    """Reader of sampled turns.

    Attributes:
        prefill: Thought that the generation prompt begins.
        parse: Parser of the tokenizer's own response template, from prompt, text and tools to a message, or None.
    """

    form: CallFormat
    prefill: str = ""
    parse: Callable[[str, str, Sequence[Any]], Mapping[str, Any]] | None = None

    def read(self, text: str, spelled: str, *, prompt: str, tools: str, seed: str) -> tuple[Turn, bool]:
        """Return a turn, and True if a call in it is malformed; such a turn is all content.

        ``spelled``: the text with its control tokens, which may mark calls. ``prompt``: end of the prompt, likewise.
        ``tools``: JSON list of the tools that may be called, or "". ``seed``: distinguishes the ids of calls.
        """
        thought, content = split_thought(self.prefill + text)
        if not tools:
            return Turn(role="assistant", content=content, thought=thought), False
        declared = json.loads(tools)
        if self.parse is not None:
            try:
                return self._turn(self.parse(prompt, spelled, declared), seed), False
            except (ValueError, TypeError, KeyError, RecursionError):
                return Turn(role="assistant", content=content, thought=thought), True
        schemas = {each["function"]["name"]: each["function"]["parameters"] for each in declared}
        before, pieces = split_calls(self.form, split_thought(self.prefill + spelled)[1])
        calls = [_call(self.form.parse(piece), schemas, f"{seed}/{number}") for number, piece in enumerate(pieces)]
        found = tuple(call for call in calls if call is not None)
        if len(found) < len(calls):
            return Turn(role="assistant", content=content, thought=thought), True
        return Turn(role="assistant", content=before.strip() if found else content, thought=thought, calls=found), False

    def _turn(self, message: Mapping[str, Any], seed: str) -> Turn:
        """Return the turn of a parsed message."""
        calls = [call["function"] for call in message.get("tool_calls") or []]
        return Turn(
            role="assistant",
            content=str(message.get("content") or ""),
            thought=str(message.get("reasoning_content") or message.get("thinking") or message.get("reasoning") or ""),
            calls=tuple(
                FunctionCall(
                    name=str(call["name"]),
                    arguments=arguments_text(dict(call["arguments"])),
                    call_id=call_id(f"{seed}/{number}"),
                )
                for number, call in enumerate(calls)
            ),
        )


def split_thought(text: str) -> tuple[str, str]:
    """Return the thought at the start of a text, and the rest. A thought without an end is all of the text."""
    found = _THOUGHT.match(text)
    return (found.group(1).strip(), text[found.end() :]) if found else ("", text)


def split_calls(form: CallFormat, text: str) -> tuple[str, list[str]]:
    """Return the text before the calls, and the text of each call, complete or not."""
    if form.name == "hermes":
        blocks = list(_BLOCK.finditer(text))
        return text[: blocks[0].start()] if blocks else text, [block.group() for block in blocks]
    if form.parse(text) is None:
        return text, []
    if form.name == "mistral":
        before, _, after = text.partition(_MISTRAL)
        return before, [_MISTRAL + each for each in _listed(after)]
    opening = OPENING.search(text) if form.name == "ours" else None
    return text[: opening.start()] if opening else "", [text]


def _listed(text: str) -> list[str]:
    """Return the calls of a JSON list, or the text if it is no list."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return [text]
    return [json.dumps([each], ensure_ascii=False) for each in found] if isinstance(found, list) else [text]


def _call(parsed: ParsedCall | None, schemas: Schemas, seed: str) -> FunctionCall | None:
    """Return a call for the agent; None if it is malformed. The agent answers wrong arguments and unknown names."""
    if parsed is None or parsed.error:
        return None
    found = parsed.arguments if parsed.arguments is not None else _from_text(parsed, schemas)
    if found is None:
        return None
    return FunctionCall(name=parsed.tool, arguments=arguments_text(found), call_id=parsed.call_id or call_id(seed))


def _from_text(parsed: ParsedCall, schemas: Schemas) -> Mapping[str, Any] | None:
    """Return the arguments of a call in rlcore's format, which has a text; None if the tool does not take it."""
    found = arguments_of(schemas.get(parsed.tool, {"type": "object"}), text=parsed.argument, named=None)
    try:
        value = json_value(parsed.argument) if isinstance(found, str) else found
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def call_id(seed: str) -> str:
    """Return an id of nine letters and digits, the only form that all chat templates accept."""
    return hashlib.sha256(seed.encode()).hexdigest()[:9]


def first_stop(text: str, stops: Sequence[str]) -> int | None:
    """Return the position of the first stop string, or None."""
    return min((position for stop in stops if (position := text.find(stop)) >= 0), default=None)

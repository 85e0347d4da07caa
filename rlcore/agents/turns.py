"""Sampled turn as the agent sees it: the tokens up to a stop string, and the thought, content and calls in the text."""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from rlcore.agents.requests import OFFER, Turn, function_call
from rlcore.environments.base import ParsedCall
from rlcore.environments.call_arguments import arguments_of
from rlcore.environments.call_formats import CallFormat, split_thought
from rlcore.openai_api.replies import FunctionCall
from rlcore.openai_api.requests import ApiError, Fields
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import Rollout

_MOST_HIDDEN = 64  # tokens, single bytes, that the next one may hide
_parsed = lru_cache(maxsize=1)(json.loads)  # one request has many answers
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")  # fields of response templates


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

        A call that the gateway would refuse in a request is malformed: agents can send back every turn.

        ``spelled``: the text with its control tokens, which may mark calls. ``prompt``: end of the prompt, likewise.
        ``tools``: JSON list of the tools that may be called, or "". ``seed``: distinguishes the ids of calls.
        """
        thought, content = split_thought(self.prefill + text)
        plain = Turn(role="assistant", content=content, thought=thought)
        if not tools:
            return plain, False
        declared = _parsed(tools)
        if self.parse is not None:
            try:
                return _turn_of(self.parse(prompt, spelled, declared), seed), False
            except Exception:  # noqa: BLE001 - the model's own template, which may fail at any text
                return plain, True
        before, parsed = self.form.calls(split_thought(self.prefill + spelled)[1])
        try:
            calls = tuple(_call(each, declared, f"{seed}/{number}") for number, each in enumerate(parsed))
        except ApiError:
            return plain, True
        return replace(plain, content=before.strip(), calls=calls) if calls else plain, False


def _turn_of(message: Mapping[str, Any], seed: str) -> Turn:
    """Return the turn of a message that a response template parsed."""
    fields, calls = Fields(message, OFFER), [call["function"] for call in message.get("tool_calls") or []]
    return Turn(
        role="assistant",
        content=fields.text("content"),
        thought=next(filter(None, map(fields.text, _THOUGHTS)), ""),
        calls=tuple(
            function_call(call["name"], call["arguments"], call_id(f"{seed}/{number}"), "call")
            for number, call in enumerate(calls)
        ),
    )


def _call(parsed: ParsedCall, declared: Sequence[Any], seed: str) -> FunctionCall:
    """Return a call for the agent, which answers wrong arguments and unknown names.

    Raises:
        ApiError: The call is malformed.
    """
    arguments = parsed.arguments if parsed.arguments is not None else _from_text(parsed, declared)
    return function_call(parsed.tool, arguments, parsed.call_id or call_id(seed), "call")


def _from_text(parsed: ParsedCall, declared: Sequence[Any]) -> object:
    """Return the arguments of a call in rlcore's format, which has a text; the text if the tool does not take it."""
    schemas = {each["function"]["name"]: each["function"]["parameters"] for each in declared}
    found = arguments_of(schemas.get(parsed.tool, {"type": "object"}), text=parsed.argument, named=None)
    return parsed.argument if isinstance(found, str) else found


def call_id(seed: str) -> str:
    """Return an id of nine letters and digits, the only form that all chat templates accept."""
    return hashlib.sha256(seed.encode()).hexdigest()[:9]


def first_stop(text: str, stops: Sequence[str]) -> int | None:
    """Return the position of the first stop string, or None."""
    return min((position for stop in stops if (position := text.find(stop)) >= 0), default=None)


def as_seen(made: Rollout, stops: Sequence[str], tokenizer: ChatTokenizer) -> Rollout:
    """Return a completion that ends with the token that completes a stop string, if it has one.

    Its text ends before the stop string. The token may reach over the string: it was sampled, so it is trained.
    """
    ids = made.completion_ids
    count = len(ids) - (ids[-1] in tokenizer.eos_ids)

    def stop_in(length: int) -> int | None:
        return first_stop(tokenizer.decode(ids[:length]), stops)

    if stop_in(count) is None:
        return replace(made, text=tokenizer.decode(ids))
    length = 1 + bisect_left(range(1, count), True, key=lambda each: stop_in(each) is not None)
    # Some tokenizers hide single bytes while the next character is incomplete.
    for earlier in range(length - 1, max(0, length - _MOST_HIDDEN), -1):
        if first_stop(text := tokenizer.decode(ids[:earlier]), stops) is not None:
            length = earlier
        elif not text.endswith("\ufffd"):
            break
    return replace(
        made,
        completion_ids=ids[:length],
        sampler_logprobs=made.sampler_logprobs[:length],
        loss_mask=made.loss_mask[:length],
        finish_reason="stop",
        text=tokenizer.decode(ids[:length])[: stop_in(length)],
    )

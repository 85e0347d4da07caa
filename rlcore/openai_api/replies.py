"""Replies of OpenAI's protocol to chat and text completions, whole and as server-sent events."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal
from uuid import uuid4

from rlcore.openai_api.requests import Json, Options

Finish = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, kw_only=True, slots=True)
class FunctionCall:
    """Call of a function; ``arguments`` is a JSON object as text."""

    name: str
    arguments: str
    call_id: str


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Token text with its logprob in nats at temperature 1, and the position's likeliest tokens."""

    text: str
    logprob: float
    top: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Next part of a completion, or all of it.

    ``finish``: the reason if it is the last, which has all thoughts and calls.
    """

    index: int
    text: str
    num_tokens: int
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: Finish | None = None
    thought: str = ""
    calls: tuple[FunctionCall, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """Writer of the reply to a request. ``name``: unique part of its id. ``created``: seconds since 1970."""

    options: Options
    is_chat: bool
    num_prompt_tokens: int
    name: str = field(default_factory=lambda: uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """Return the body of a reply that is no stream; the pieces of each choice are in order."""
        choices: dict[int, list[Piece]] = {}
        for piece in pieces:
            choices.setdefault(piece.index, []).append(piece)
        kind = "chat.completion" if self.is_chat else "text_completion"
        body = self._body(kind, [self._choice(choices[index]) for index in sorted(choices)])
        return body | {"usage": self._usage(sum(piece.num_tokens for piece in pieces))}

    def stream(self, choices: Sequence[Piece]) -> Iterator[str]:
        yield from self.opening(len(choices))
        for piece in choices:
            yield from self.events(piece)
        yield from self.closing(sum(piece.num_tokens for piece in choices))

    def opening(self, num_choices: int) -> Iterator[str]:
        """Yield the first events of a stream: in a chat, the role of each choice."""
        for index in range(num_choices if self.is_chat else 0):
            yield self._chunk(index, delta={"role": "assistant", "content": ""})

    def events(self, piece: Piece, *, offset: int = 0) -> Iterator[str]:
        """Yield the next events of a stream; ``offset``: characters of the choice that were sent before."""
        logprobs = self._logprobs(piece.logprobs, offset)
        if not self.is_chat:
            yield self._chunk(piece.index, text=piece.text, logprobs=logprobs, finish_reason=piece.finish)
            return
        if piece.thought:
            yield self._chunk(piece.index, delta={"reasoning_content": piece.thought})
        if piece.text or piece.logprobs:
            yield self._chunk(piece.index, delta={"content": piece.text}, logprobs=logprobs)
        if piece.calls:
            calls = [{"index": index, **_call(call)} for index, call in enumerate(piece.calls)]
            yield self._chunk(piece.index, delta={"tool_calls": calls})
        if piece.finish:
            yield self._chunk(piece.index, delta={}, finish_reason=piece.finish)

    def closing(self, num_tokens: int) -> Iterator[str]:
        """Yield the last events of a stream of ``num_tokens``: its usage, if requested, and the end."""
        if self.options.include_usage:
            yield event(self._body(self._chunk_kind, []) | {"usage": self._usage(num_tokens)})
        yield "data: [DONE]\n\n"

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self.is_chat else "text_completion"

    def _body(self, kind: str, choices: Sequence[Json]) -> dict[str, Any]:
        prefix = "chatcmpl" if self.is_chat else "cmpl"
        shared = {"id": f"{prefix}-{self.name}", "object": kind, "created": self.created, "model": self.options.model}
        return shared | {"choices": list(choices)}

    def _chunk(self, index: int, **fields: Any) -> str:
        body = self._body(self._chunk_kind, [{"index": index, "finish_reason": None, "logprobs": None, **fields}])
        return event(body | ({"usage": None} if self.options.include_usage else {}))

    def _choice(self, parts: Sequence[Piece]) -> dict[str, Any]:
        text, last = "".join(part.text for part in parts), parts[-1]
        logprobs = self._logprobs([each for part in parts for each in part.logprobs], 0)
        written = {"message": _message(text, last)} if self.is_chat else {"text": text}
        return {"index": last.index, **written, "logprobs": logprobs, "finish_reason": last.finish}

    def _logprobs(self, found: Sequence[TokenLogprob], offset: int) -> dict[str, Any] | None:
        if self.options.top_logprobs is None:
            return None
        if self.is_chat:
            return {"content": logprob_entries(found), "refusal": None}
        return {
            "tokens": [each.text for each in found],
            "token_logprobs": [each.logprob for each in found],
            "top_logprobs": [dict(each.top) for each in found],
            "text_offset": [*accumulate([len(each.text) for each in found], initial=offset)][:-1],
        }

    def _usage(self, num_tokens: int) -> dict[str, Any]:
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": num_tokens,
            "total_tokens": self.num_prompt_tokens + num_tokens,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": 0},
        }


def event(data: Json, name: str = "") -> str:
    """Return a server-sent event in ASCII: some clients split lines at every separator of Unicode."""
    return (f"event: {name}\n" if name else "") + f"data: {json.dumps(data)}\n\n"


def logprob_entries(found: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    """Return logprobs as chats and responses write them."""
    return [
        _entry(each.text, each.logprob) | {"top_logprobs": [_entry(text, value) for text, value in each.top]}
        for each in found
    ]


def model_card(name: str, created: int = 0) -> dict[str, Any]:
    """Return an entry of ``/v1/models``."""
    return {"id": name, "object": "model", "created": created, "owned_by": "rlcore"}


def _entry(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def _message(text: str, last: Piece) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
    if last.thought:
        message["reasoning_content"] = last.thought
    if last.calls:
        message |= {"content": text or None, "tool_calls": [_call(call) for call in last.calls]}
    return message


def _call(call: FunctionCall) -> dict[str, Any]:
    return {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}

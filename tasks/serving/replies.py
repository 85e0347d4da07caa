"""Replies in the format of OpenAI's protocol, complete and in chunks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from rlcore.tasks.serving.engine import Piece, TokenLogprob
from rlcore.tasks.serving.requests import ChatRequest, CompletionRequest


@dataclass(kw_only=True)
class Gathered:
    """Completion assembled from its pieces so far."""

    text: str = ""
    num_tokens: int = 0
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: str | None = None

    def add(self, piece: Piece) -> None:
        """Append the next piece."""
        self.text += piece.text
        self.num_tokens += piece.num_tokens
        self.logprobs += piece.logprobs
        self.finish = piece.finish


@dataclass(frozen=True, kw_only=True)
class Head:
    """Common fields of all parts of a reply: ``id`` and ``created`` (seconds since 1970)."""

    request: ChatRequest | CompletionRequest
    id: str
    created: int

    @property
    def is_chat(self) -> bool:
        """True for a chat request."""
        return isinstance(self.request, ChatRequest)


def whole_answer(head: Head, choices: Mapping[int, Gathered], prompt_tokens: int) -> dict[str, Any]:
    """Return the reply to a request without streaming."""
    found = [_choice(head, index, choices[index]) for index in sorted(choices)]
    tokens = sum(each.num_tokens for each in choices.values())
    kind = "chat.completion" if head.is_chat else "text_completion"
    return _envelope(head, kind, found) | {"usage": usage(prompt_tokens, tokens)}


def opening_chunks(head: Head, num_choices: int) -> list[dict[str, Any]]:
    """Return the first chunks of a stream: in a chat, the role of each choice."""
    if not head.is_chat:
        return []
    return [_chunk(head, index, {"role": "assistant", "content": ""}, None, None) for index in range(num_choices)]


def chunk(head: Head, index: int, piece: Piece, offset: int) -> dict[str, Any]:
    """Return the next chunk of a stream; ``offset``: characters of the choice that were sent before."""
    logprobs = _logprobs(head, piece.logprobs, offset)
    if head.is_chat:
        return _chunk(head, index, {"content": piece.text} if piece.text else {}, logprobs, piece.finish)
    choice = {"index": index, "text": piece.text, "logprobs": logprobs, "finish_reason": piece.finish}
    return _envelope(head, "text_completion", [choice])


def usage_chunk(head: Head, prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    """Return the last chunk of a stream that requested its usage."""
    kind = "chat.completion.chunk" if head.is_chat else "text_completion"
    return _envelope(head, kind, []) | {"usage": usage(prompt_tokens, completion_tokens)}


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """Return the numbers of tokens of a request."""
    total = prompt_tokens + completion_tokens
    return {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": total}


def model_card(name: str, created: int) -> dict[str, Any]:
    """Return an entry of ``/v1/models``."""
    return {"id": name, "object": "model", "created": created, "owned_by": "rlcore"}


def _envelope(head: Head, kind: str, choices: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "id": head.id, "object": kind, "created": head.created, "model": head.request.model, "choices": list(choices)
    }  # fmt: skip


def _choice(head: Head, index: int, found: Gathered) -> dict[str, Any]:
    logprobs = _logprobs(head, found.logprobs, 0)
    body = {"message": {"role": "assistant", "content": found.text}} if head.is_chat else {"text": found.text}
    return {"index": index, **body, "logprobs": logprobs, "finish_reason": found.finish}


def _chunk(
    head: Head, index: int, delta: Mapping[str, str], logprobs: Mapping[str, Any] | None, finish: str | None
) -> dict[str, Any]:
    choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
    return _envelope(head, "chat.completion.chunk", [choice])


def _logprobs(head: Head, found: Sequence[TokenLogprob], offset: int) -> dict[str, Any] | None:
    if head.request.top_logprobs is None:
        return None
    if head.is_chat:
        content = [
            _entry(each.text, each.logprob) | {"top_logprobs": [_entry(text, value) for text, value in each.top]}
            for each in found
        ]
        return {"content": content, "refusal": None}
    return {
        "tokens": [each.text for each in found],
        "token_logprobs": [each.logprob for each in found],
        "top_logprobs": [dict(each.top) for each in found],
        "text_offset": [*accumulate([len(each.text) for each in found], initial=offset)][:-1],
    }


def _entry(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

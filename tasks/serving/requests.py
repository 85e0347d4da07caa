"""Strict reader of request bodies: unsupported parameters are rejected by name before any computation."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rlcore.openai_api.errors import ApiError
from rlcore.types import Message

MAX_CHOICES, MAX_STOPS, MAX_TOP_LOGPROBS = 16, 4, 20
_MAX_STOP_CHARS = 1000
_COLDEST = 0.01  # a lower temperature equals greedy, and its logits would overflow
_ROLES = ("system", "user", "assistant")
# Parameters that are accepted only at values without effect.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_p": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "store": (False,),
    "service_tier": ("auto", "default"),
}
_NEUTRAL_CHAT = {**_NEUTRAL, "response_format": ({"type": "text"},), "tools": ([],), "modalities": (["text"],)}
_NEUTRAL_COMPLETION = {**_NEUTRAL, "echo": (False,), "best_of": (1,), "suffix": ("",)}


@dataclass(frozen=True, kw_only=True)
class Request:
    """Common fields of both kinds of request; ``max_tokens`` None: as many as the model's positions allow."""

    model: str
    max_tokens: int | None
    num_samples: int
    temperature: float
    seed: int
    stop: tuple[str, ...]
    top_logprobs: int | None
    stream: bool
    with_usage: bool


@dataclass(frozen=True, kw_only=True)
class ChatRequest(Request):
    """Conversation to be answered."""

    messages: tuple[Message, ...]


@dataclass(frozen=True, kw_only=True)
class CompletionRequest(Request):
    """Texts or token ids to be continued."""

    prompts: tuple[str | tuple[int, ...], ...]


def read_chat(body: Mapping[str, Any]) -> ChatRequest:
    """Parse a body of ``/v1/chat/completions``.

    Raises:
        ApiError: a parameter is missing, wrong or not supported.
    """
    fields = _Fields(body)
    messages = fields.take("messages", _messages)
    tokens, newer = fields.take("max_tokens", _tokens, None), fields.take("max_completion_tokens", _tokens, None)
    with_logprobs = fields.take("logprobs", _flag, False)
    top = fields.take("top_logprobs", _top, None)
    if top is not None and not with_logprobs:
        raise ApiError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
    common = _common(fields)
    fields.end(_NEUTRAL_CHAT)
    return ChatRequest(
        messages=messages,
        max_tokens=newer if newer is not None else tokens,
        top_logprobs=(top or 0) if with_logprobs else None,
        **common,
    )


def read_completion(body: Mapping[str, Any]) -> CompletionRequest:
    """Parse a body of ``/v1/completions``.

    Raises:
        ApiError: a parameter is missing, wrong or not supported.
    """
    fields = _Fields(body)
    prompts = fields.take("prompt", _prompts)
    tokens = fields.take("max_tokens", _tokens, 16)
    top = fields.take("logprobs", _top, None)
    common = _common(fields)
    fields.end(_NEUTRAL_COMPLETION)
    if len(prompts) * common["num_samples"] > MAX_CHOICES:
        raise ApiError(400, f"prompts times n may be {MAX_CHOICES} at most", param="n")
    return CompletionRequest(prompts=prompts, max_tokens=tokens, top_logprobs=top, **common)


def _common(fields: _Fields) -> dict[str, Any]:
    stream = fields.take("stream", _flag, False)
    options = fields.take("stream_options", _stream_options, None)
    if options is not None and not stream:
        raise ApiError(400, "stream_options needs stream to be true", param="stream_options")
    fields.take("user", _text, "")
    seed = fields.take("seed", _whole, None)
    return {
        "model": fields.take("model", _text),
        "num_samples": fields.take("n", _choices, 1),
        "temperature": fields.take("temperature", _temperature, 1.0),
        "seed": secrets.randbits(63) if seed is None else seed,
        "stop": fields.take("stop", _stop, ()),
        "stream": stream,
        "with_usage": bool(options),
    }


class _Fields:
    """Unread parameters of a body. null means that a parameter is absent."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._rest = {name: value for name, value in body.items() if value is not None}

    def take(self, name: str, read: Callable[[Any], Any], *default: Any) -> Any:
        """Read a parameter with its reader, which raises ValueError with the expected form."""
        if name not in self._rest:
            if default:
                return default[0]
            raise ApiError(400, f"the parameter {name} is missing", param=name, code="missing_required_parameter")
        try:
            return read(self._rest.pop(name))
        except ValueError as error:
            raise ApiError(400, f"{name} has to be {error}", param=name, code="invalid_value") from None

    def end(self, neutral: Mapping[str, tuple[Any, ...]]) -> None:
        """Reject the remaining parameters, except at values without effect."""
        for name, value in self._rest.items():
            if name not in neutral:
                raise ApiError(400, f"the parameter {name[:80]} is not supported", param=name[:80], code="unsupported")
            if not any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in neutral[name]):
                what = f"{name} is supported as {json.dumps(neutral[name][0])} alone"
                raise ApiError(400, what, param=name, code="unsupported")


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("a text")
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value


def _whole(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) >= 2**63:
        raise ValueError("a whole number of 64 bits")
    return value


def _between(value: Any, low: int, high: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ValueError(f"a whole number from {low} to {high}")
    return value


def _tokens(value: Any) -> int:
    return _between(value, 1, 2**31 - 1)


def _choices(value: Any) -> int:
    return _between(value, 1, MAX_CHOICES)


def _top(value: Any) -> int:
    return _between(value, 0, MAX_TOP_LOGPROBS)


def _temperature(value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 2:
        raise ValueError("a number from 0 to 2")
    return max(float(value), _COLDEST) if value else 0.0


def _stop(value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    is_list = isinstance(texts, list) and len(texts) <= MAX_STOPS
    if not is_list or not all(isinstance(each, str) and 0 < len(each) <= _MAX_STOP_CHARS for each in texts):
        raise ValueError(f"a text or up to {MAX_STOPS} texts, each of 1 to {_MAX_STOP_CHARS} characters")
    return tuple(texts)


def _stream_options(value: Any) -> bool:
    if not isinstance(value, dict) or value.keys() - {"include_usage"}:
        raise ValueError('{"include_usage": true} or {"include_usage": false}')
    return _flag(value.get("include_usage", False))


def _messages(value: Any) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        raise ValueError("a list of messages, at least one")
    return tuple(map(_message, value))


def _message(value: Any) -> Message:
    if not isinstance(value, dict) or value.get("role") not in _ROLES:
        raise ValueError(f"messages of the roles {', '.join(_ROLES)}")
    if unknown := sorted(value.keys() - {"role", "content"}):
        raise ValueError(f"messages of role and content; {unknown[0][:80]} is not supported")
    return Message(role=value["role"], content=_content(value.get("content")))


def _content(value: Any) -> str:
    """Return a text, or the joined texts of a list of parts."""
    parts = [{"type": "text", "text": value}] if isinstance(value, str) else value
    if not isinstance(parts, list) or not parts:
        raise ValueError("messages whose content is a text or a list of texts")
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError('messages whose parts are {"type": "text", "text": …}; nothing else is supported')
    return "".join(part["text"] for part in parts)


def _prompts(value: Any) -> tuple[str | tuple[int, ...], ...]:
    is_one = isinstance(value, str) or (isinstance(value, list) and all(type(each) is int for each in value))
    several = [value] if is_one else value
    if not isinstance(several, list) or not several or len(several) > MAX_CHOICES:
        raise ValueError(f"a text, or a list of up to {MAX_CHOICES} texts, or token ids")
    return tuple(map(_prompt, several))


def _prompt(value: Any) -> str | tuple[int, ...]:
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not all(type(each) is int for each in value):
        raise ValueError("a text, a list of texts, token ids, or a list of lists of token ids")
    return tuple(value)

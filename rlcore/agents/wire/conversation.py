"""Requests and answers, independent of the API in which an agent writes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rlcore.types import Role

Kind = Literal["chat", "responses"]
Finish = Literal["stop", "length", "tool_calls"]
Json = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class FunctionCall:
    """Call of an agent's tool; ``arguments`` is a JSON object as text."""

    name: str
    arguments: str
    call_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """Message. ``thought``: reasoning apart from the content. ``call_id``: call that the output of a tool answers."""

    role: Role
    content: str = ""
    thought: str = ""
    calls: tuple[FunctionCall, ...] = ()
    call_id: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """Request for ``n`` answers to a conversation.

    Attributes:
        model: Name that the agent gave; the answer has the same.
        tools: JSON list of the declared tools in the form of chat completions, or "".
        may_call: False if the agent wants no calls, although it declares tools.
        fields: Parameters that the answer repeats.
    """

    kind: Kind
    model: str
    turns: tuple[Turn, ...]
    tools: str = ""
    may_call: bool = True
    max_tokens: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    logprobs: bool = False
    stream: bool = False
    include_usage: bool = False
    fields: Json = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """One answer as the agent sees it. ``tokens``: text and log-probability of each sampled token."""

    turn: Turn
    finish: Finish
    num_prompt_tokens: int
    tokens: tuple[tuple[str, float], ...]

    @property
    def logprobs(self) -> list[dict[str, Any]]:
        """Log-probabilities in nats as both APIs write them."""
        return [
            {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
            for text, logprob in self.tokens
        ]

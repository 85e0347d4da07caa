"""The interface of an engine: token ids in, pieces of text out."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Literal, Protocol

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """Completions of one prompt. ``place``: its number in the request, which decides the draws together with ``seed``.

    ``temperature`` 0 takes the likeliest token. ``stop``: texts that end a completion and are left out of it.
    ``top_logprobs``: how many likeliest tokens come with each token's log-probability; None: no log-probabilities.
    """

    prompt_ids: tuple[int, ...]
    max_tokens: int
    num_samples: int
    temperature: float
    seed: int
    place: int = 0
    stop: tuple[str, ...] = ()
    top_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's text and its log-probability at temperature 1, with those of the likeliest tokens in its place."""

    text: str
    logprob: float
    top: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """The next text of one completion. ``num_tokens``: how many tokens it took; ``finish``: why it is the last."""

    index: int
    text: str
    num_tokens: int
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: FinishReason | None = None


class Engine(Protocol):
    """Completes prompts. Closing the iterator ends the work on it."""

    def generate(self, job: Job) -> AsyncGenerator[Piece]:
        """The pieces of all completions of a job, in whatever order they come.

        Raises:
            SamplingError: the engine is broken.
        """
        ...

    def is_healthy(self) -> bool:
        """True if it can be asked."""
        ...

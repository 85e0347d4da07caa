"""Engine interface of the server: token ids in, pieces of text out."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

from rlcore.openai_api.replies import Piece


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """Completions of one prompt. ``place``: its number in the request; it and ``seed`` determine the draws.

    ``temperature`` 0 is greedy. ``stop``: texts that end a completion and are not part of it. ``top_logprobs``: number
    of most likely tokens listed with each token's logprob; None: no logprobs.
    """

    prompt_ids: tuple[int, ...]
    max_tokens: int
    num_samples: int
    temperature: float
    seed: int
    place: int = 0
    stop: tuple[str, ...] = ()
    top_logprobs: int | None = None


class Engine(Protocol):
    """Engine that completes prompts. Closing the iterator ends the work on it."""

    def generate(self, job: Job) -> AsyncGenerator[Piece]:
        """Yield the pieces of all completions of a job, in any order.

        Raises:
            SamplingError: the engine is broken.
        """
        ...

    def is_healthy(self) -> bool:
        """Return True if it accepts jobs."""
        ...

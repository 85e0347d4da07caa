"""Engine interface of the server: token ids in, pieces of text out."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

from rlcore.openai_api.replies import Piece
from rlcore.openai_api.requests import Options


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """Completions of one prompt. ``place``: its number in the request; it and the seed determine the draws."""

    prompt_ids: tuple[int, ...]
    max_tokens: int
    options: Options
    place: int = 0


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

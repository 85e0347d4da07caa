"""Limits of an agent's episode, and the record that remains of it."""

from __future__ import annotations

from dataclasses import dataclass

from rlcore.types import FinishReason, Rollout


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits of an episode.

    Attributes:
        max_calls: Answers of an episode.
        max_new_tokens: Tokens of a sample after its prompt.
        max_tokens: Tokens of a sample, prompt included.
        max_body_bytes: Size of a request.
        max_waiting: Requests that wait for the engine, of all agents.
        reward_range: Least and greatest reward that an agent may post.
    """

    max_calls: int
    max_new_tokens: int
    max_tokens: int
    max_body_bytes: int = 4 << 20
    max_waiting: int = 1024
    reward_range: tuple[float, ...] = (0.0, 1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """Answer of an episode, for people.

    ``parent``: number of the call that it continues, or None. ``text``: all sampled tokens, decoded.
    """

    number: int
    kind: str
    parent: int | None
    fork: str
    num_prompt_tokens: int
    num_sampled_tokens: int
    seconds: float
    text: str
    finish_reason: FinishReason


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Record:
    """Episode as recorded. Answers that never reached the agent are no part of it.

    Attributes:
        rollout: The sample of the last answer, with its branches; None if the agent never got an answer.
        reward: Reward that the agent posted, or None.
        refused: First errors that the agent got.
        error: Unexpected exception of the gateway, or "".
    """

    rollout: Rollout | None
    reward: float | None
    calls: tuple[Call, ...]
    refused: tuple[str, ...]
    error: str = ""

"""Limits of an agent's episode, and the record that remains of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rlcore.errors import shown
from rlcore.openai_api.errors import ApiError
from rlcore.types import FinishReason, Rollout

_MAX_REWARD = 1e6


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits of an episode.

    Attributes:
        max_calls: Answers of an episode.
        max_new_tokens: Tokens of a sample after its prompt.
        max_tokens: Tokens of a sample, prompt included.
        max_body_bytes: Size of a request.
        max_waiting: Requests that wait for the engine, of all agents.
    """

    max_calls: int
    max_new_tokens: int
    max_tokens: int
    max_body_bytes: int = 4 << 20
    max_waiting: int = 1024


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
        reward: Reward that the agent reported last, or None.
        reward_parts: Its parts by name.
        refused: First errors that the agent got.
        error: Unexpected exception of the gateway, or "".
    """

    rollout: Rollout | None
    reward: float | None
    reward_parts: Mapping[str, float]
    calls: tuple[Call, ...]
    refused: tuple[str, ...]
    error: str = ""


def finite(value: object, param: str) -> float:
    """Return a number.

    Raises:
        ApiError: It is no finite number, or so large that no statistic of a group would be finite.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _MAX_REWARD:
        what = f"{param} must be a finite number up to {_MAX_REWARD:g}, not {shown(value, max_chars=60)}"
        raise ApiError(400, what, param=param)
    return float(value)


def finite_parts(parts: object) -> dict[str, float]:
    """Return numbers by name.

    Raises:
        ApiError: One is no finite number.
    """
    if parts is None:
        return {}
    if not isinstance(parts, Mapping):
        raise ApiError(400, "parts must be an object of numbers", param="parts")
    return {str(name): finite(value, f"parts.{shown(name, max_chars=60)}") for name, value in parts.items()}

"""What a reward function is, and the two helpers that every grader shares."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rlcore.types import Rollout, Score

CORRECT_FROM = 0.99
"""A score from here on counts as a correct answer (scorers with partial credit return floats near 1)."""


class RewardFn(Protocol):
    """Scores a batch of rollouts, in their order: one :class:`Score` each, with ``parts == {name: value}``.

    A wrong or unparsable answer is a value; a failure of the grader is ``Score(value=None, error=...)``.
    """

    @property
    def name(self) -> str: ...

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]: ...


def graded(name: str, value: float) -> Score:
    """The score of a rollout that the part ``name`` could judge."""
    return Score(value=value, parts={name: value})


def ungraded(error: str) -> Score:
    """The score of a rollout whose grader failed: it leaves the baseline and is counted."""
    return Score(value=None, parts={}, error=error)


def is_correct(score: Score) -> bool:
    """Whether a score counts as a correct answer in an evaluation; an unscored rollout does not."""
    return score.value is not None and score.value >= CORRECT_FROM

"""Reward protocol, functions shared by all graders, and the reward that an environment gives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rlcore.errors import RewardError
from rlcore.rewards.grader_pool import GraderPool
from rlcore.types import FailedRollout, Rollout, Score, ScoredRollout

VERIFIERS = ("math", "code", "procedural")
"""Rewards that compare an answer with a reference."""
MAX_ERRORS = 0.1
"""A grader that fails on a larger fraction of the rollouts stops a run."""


class RewardFn(Protocol):
    """Grader of rollouts: one :class:`Score` each, in order, with ``terms == {name: value}``.

    A wrong or unparsable answer has a value. A failure of the grader is ``Score(value=None, error=...)``.
    """

    @property
    def name(self) -> str: ...

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]: ...


def unwrap_reward(reward: RewardFn) -> RewardFn:
    """Return the reward itself, or the one that a proxy computes in another process."""
    found: RewardFn = getattr(reward, "unwrap_reward", reward)
    return found


def scored(name: str, value: float) -> Score:
    """Return the score of a rollout that the term ``name`` graded."""
    return Score(value=value, terms={name: value})


def failed_score(error: str) -> Score:
    """Return the score of a rollout whose grader failed. It is counted, and excluded from the baseline."""
    return Score(value=None, terms={}, error=error)


def score_each(rollouts: Sequence[Rollout | FailedRollout], grade: RewardFn) -> list[Score]:
    """Return one score per rollout for an evaluation, in order. A failed rollout is wrong.

    A problem without an answer stays in the denominator. ``error`` is set if engine or grader failed.
    """
    scores = iter(grade([rollout for rollout in rollouts if isinstance(rollout, Rollout)]))
    return [
        next(scores) if isinstance(rollout, Rollout) else Score(value=0.0, terms={}, error=rollout.reason)
        for rollout in rollouts
    ]


def score_groups(reward: RewardFn, groups: Sequence[Sequence[Rollout]]) -> list[list[ScoredRollout]]:
    """Score groups in one batched call."""
    scores = iter(reward([rollout for group in groups for rollout in group]))
    return [[ScoredRollout(rollout=rollout, score=next(scores)) for rollout in group] for group in groups]


def check_error_rate(scores: Sequence[Score], *, max_rate: float = MAX_ERRORS) -> None:
    """Stop a run if its grader fails too often.

    Raises:
        RewardError: More than ``max_rate`` (0..1) of the scores are None; names the most frequent error.
    """
    errors = [score.error for score in scores if score.value is None]
    if len(errors) > max_rate * len(scores):
        most, count = Counter(errors).most_common(1)[0]
        raise RewardError(
            f"{len(errors)} of {len(scores)} rollouts could not be scored (allowed: {max_rate:.0%}); "
            f"{count} times: {most}",
            fix="inspect the errors in the rollout table; raise timeout_seconds if the machine is busy",
        )


def score_all(
    prepared: Sequence[Score | Mapping[str, Any]], pool: GraderPool, to_score: Callable[[Any], Score]
) -> list[Score]:
    """Return the scores that are known already, and grade the requests.

    An answer that makes its grader fail is wrong, because a policy could otherwise choose to have no score.
    """
    outcomes = iter(pool.grade_all([item for item in prepared if not isinstance(item, Score)]))
    scores = []
    for item in prepared:
        if isinstance(item, Score):
            scores.append(item)
            continue
        outcome = next(outcomes)
        is_grader_error = outcome.error and not outcome.is_of_answer
        scores.append(failed_score(outcome.error) if is_grader_error else to_score(outcome.value or False))
    return scores


@dataclass(frozen=True, kw_only=True)
class EnvironmentOptions:
    """Options of the reward ``environment``: none."""


class EnvironmentReward:
    """Value of ``get_reward`` of the environment, or of ``POST /v1/reward`` of the agent; unscored without one."""

    name = "environment"

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        return [
            failed_score("neither environment nor agent gave a reward")
            if rollout.environment_reward is None
            else scored(self.name, rollout.environment_reward)
            for rollout in rollouts
        ]

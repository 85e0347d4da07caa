"""What a reward function is, and what every grader shares."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from rlcore.errors import RewardError
from rlcore.rewards.grader_pool import GraderPool
from rlcore.types import FailedRollout, Rollout, Score, ScoredRollout

MAX_ERRORS = 0.1
"""A grader that fails on a larger share of the rollouts stops a run."""


class RewardFn(Protocol):
    """Scores a batch of rollouts, in their order: one :class:`Score` each, with ``parts == {name: value}``.

    A wrong or unparsable answer is a value; a failure of the grader is ``Score(value=None, error=...)``.
    """

    @property
    def name(self) -> str: ...

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]: ...


def unwrap_reward(reward: RewardFn) -> RewardFn:
    """What a reward is: itself, or what it has computed in another process."""
    found: RewardFn = getattr(reward, "unwrap_reward", reward)
    return found


def scored(name: str, value: float) -> Score:
    """The score of a rollout that the part ``name`` could judge."""
    return Score(value=value, terms={name: value})


def failed_score(error: str) -> Score:
    """The score of a rollout whose grader failed: it is counted, and left out of the baseline."""
    return Score(value=None, terms={}, error=error)


def score_each(rollouts: Sequence[Rollout | FailedRollout], grade: RewardFn) -> list[Score]:
    """One score each, in their order, for an evaluation: what the engine could not produce is wrong, with its reason.

    A problem that gets no answer stays in the denominator. ``error`` is set where engine or grader failed.
    """
    scores = iter(grade([rollout for rollout in rollouts if isinstance(rollout, Rollout)]))
    return [
        next(scores) if isinstance(rollout, Rollout) else Score(value=0.0, terms={}, error=rollout.reason)
        for rollout in rollouts
    ]


def score_groups(reward: RewardFn, groups: Sequence[Sequence[Rollout]]) -> list[list[ScoredRollout]]:
    """Scored groups, from one batched call over all of them."""
    scores = iter(reward([rollout for group in groups for rollout in group]))
    return [[ScoredRollout(rollout=rollout, score=next(scores)) for rollout in group] for group in groups]


def check_error_rate(scores: Sequence[Score], *, max_rate: float = MAX_ERRORS) -> None:
    """Stop a run whose grader, not whose answers, fails.

    Raises:
        RewardError: more than ``max_rate`` (0..1) of the scores are None; says the most frequent error.
    """
    errors = [score.error for score in scores if score.value is None]
    if len(errors) > max_rate * len(scores):
        most, count = Counter(errors).most_common(1)[0]
        raise RewardError(
            f"{len(errors)} of {len(scores)} rollouts could not be scored (allowed: {max_rate:.0%}); "
            f"{count} times: {most}",
            fix="look at the errors in the rollout table; raise timeout_seconds if the machine is busy",
        )


def score_all(
    prepared: Sequence[Score | Mapping[str, Any]], pool: GraderPool, to_score: Callable[[Any], Score]
) -> list[Score]:
    """The scores that were decided at once, and for each request its graded value as a score, or its error.

    An answer that made its grader fail is wrong: a policy could choose to have no score.
    """
    outcomes = iter(pool.grade_all([item for item in prepared if not isinstance(item, Score)]))
    scores = []
    for item in prepared:
        if isinstance(item, Score):
            scores.append(item)
            continue
        outcome = next(outcomes)
        is_ours = outcome.error and not outcome.is_of_answer
        scores.append(failed_score(outcome.error) if is_ours else to_score(outcome.value or False))
    return scores

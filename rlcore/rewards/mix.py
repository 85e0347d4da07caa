"""Several rewards as one: a weighted sum that keeps its parts, never hides a failure, and says what each part did."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from types import TracebackType
from typing import Protocol, runtime_checkable

from rlcore.errors import RewardError, RlcoreError
from rlcore.rewards.base import RewardFn, failed_score
from rlcore.types import Prompt, Rollout, Score


@runtime_checkable
class Closeable(Protocol):
    """A part that holds processes."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class WeightedTerm:
    """One component of the reward; a value below ``gate`` makes the total ``below_gate``.

    ``data``: the data sets whose rollouts it scores; none named: all of them.
    """

    reward: RewardFn
    weight: float
    gate: float | None = None
    below_gate: float = 0.0
    data: tuple[str, ...] = ()

    def is_on(self, prompt: Prompt) -> bool:
        """Whether the component scores the completions of ``prompt``."""
        return not self.data or prompt.dataset in self.data


class WeightedReward:
    """``value = Σ weight · part``, rewards of turns likewise; ``parts`` holds each component before weighting.

    Where a part is below its gate, the total is that gate's ``below_gate``; of several closed gates the first counts,
    and it counts also where a part behind it is unscored. Where a part is unscored or NaN otherwise, the total is
    unscored, with that part's error: a sum over the others would be another reward. An exception inside a part leaves
    the whole batch unscored by it, and :func:`check_error_rate` then stops the run. A part that is not on a rollout's
    data set is as if it were not there; without any part, every total is 0. Use it in a ``with`` block to end the
    processes of its parts.
    """

    name = "mix"

    def __init__(self, parts: Sequence[WeightedTerm]) -> None:
        self._parts = tuple(parts)
        self._names = {part.reward.name for part in self._parts}

    def __enter__(self) -> WeightedReward:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        """
        Raises:
            RewardError: an infinite value, or a part that scored another number of rollouts than it was given.
        """
        if not self._parts:
            return [Score(value=0.0, terms={}) for _ in rollouts]
        columns = [_column(part, rollouts) for part in self._parts]
        return [self._total(row) for row in zip(*columns, strict=True)] if rollouts else []

    @property
    def parts(self) -> tuple[WeightedTerm, ...]:
        """The components, in the order of the configuration."""
        return self._parts

    def close(self) -> None:
        """End the processes of the parts that hold some."""
        for part in self._parts:
            if isinstance(part.reward, Closeable):
                part.reward.close()

    def _total(self, scores: Sequence[Score | None]) -> Score:
        total, parts, errors, closed = 0.0, dict[str, float](), list[str](), list[float]()
        turn_rewards: list[float] = []
        is_undecided = False  # an unscored part has a gate that nobody can say is open
        present = [(part, score) for part, score in zip(self._parts, scores, strict=True) if score is not None]
        if not present:
            return failed_score("no reward is on its data set")
        skipped = tuple(sorted(self._names - {part.reward.name for part, _ in present}))
        for part, score in present:
            error = _fault(part.reward.name, score)
            if error or score.value is None:
                errors.append(error)
                is_undecided |= part.gate is not None and not closed
                continue
            parts |= score.terms
            total += part.weight * score.value
            weighted = [part.weight * reward for reward in score.turn_rewards]
            turn_rewards = [sum(pair) for pair in zip_longest(turn_rewards, weighted, fillvalue=0.0)]
            if part.gate is not None and score.value < part.gate:
                closed.append(part.below_gate)
        if closed and not is_undecided:
            return Score(value=closed[0], terms=parts, skipped=skipped)
        if errors:
            return Score(value=None, terms=parts, error="; ".join(errors), skipped=skipped)
        return Score(value=total, terms=parts, turn_rewards=tuple(turn_rewards), skipped=skipped)


def _column(part: WeightedTerm, rollouts: Sequence[Rollout]) -> list[Score | None]:
    """The part's score of each rollout; None where it is not on the rollout's data set."""
    places = [place for place, rollout in enumerate(rollouts) if part.is_on(rollout.prompt)]
    column: list[Score | None] = [None] * len(rollouts)
    found = scores_of(part.reward, [rollouts[place] for place in places]) if places else []
    for place, score in zip(places, found, strict=True):
        column[place] = score
    return column


def scores_of(reward: RewardFn, rollouts: Sequence[Rollout]) -> list[Score]:
    """One score each; where the reward raises, none of them has a value.

    Raises:
        RewardError: another number of scores.
    """
    try:
        scores = reward(rollouts)
    except RlcoreError:
        raise
    except Exception as error:  # noqa: BLE001 - a failing grader is an error value per rollout, counted, never a 0
        return [failed_score(f"{type(error).__name__}: {error}")] * len(rollouts)
    if len(scores) != len(rollouts):
        raise RewardError(f"{reward.name} returned {len(scores)} scores for {len(rollouts)} rollouts")
    return scores


_OF_A_PART = re.compile(r"_(?:std|prompt_tokens|completion_tokens)$")  # what a part says beside its value


def term_statistics(scored: Sequence[Score], *, all_scores: Sequence[Score]) -> dict[str, float]:
    """Per part: mean, population std and share of zeros over ``scored``, share without a value over ``all_scores``.

    ``reward/term/<name>``, ``reward/term_std/<name>``, ``reward/term_zero/<name>``, ``reward/term_unscored/<name>``.
    Values are those before weighting and gates; rollouts that a part is not on are not counted for it.
    """
    metrics = dict[str, float]()
    for name in sorted({name for score in scored for name in score.terms}):
        values = [score.terms[name] for score in scored if name in score.terms]
        mean = sum(values) / len(values)
        metrics[f"reward/term/{name}"] = mean
        metrics[f"reward/term_std/{name}"] = math.sqrt(sum((value - mean) ** 2 for value in values) / len(values))
        metrics[f"reward/term_zero/{name}"] = values.count(0.0) / len(values)
        asked = [score for score in all_scores if _OF_A_PART.sub("", name) not in score.skipped]
        metrics[f"reward/term_unscored/{name}"] = sum(name not in score.terms for score in asked) / len(asked)
    return metrics


def _fault(name: str, score: Score) -> str:
    """Why a part cannot be summed; empty when it can."""
    if score.value is None:
        return f"{name}: {score.error}"
    if math.isnan(score.value):
        return f"{name}: the score is not a number"
    if math.isinf(score.value):
        raise RewardError(f"{name} gave an infinite score", fix="bound the reward: clip, or a finite failure value")
    return ""

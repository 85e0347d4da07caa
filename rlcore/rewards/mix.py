"""Weighted sum of several rewards, which keeps its terms, never hides a failure, and reports statistics per term."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Protocol, runtime_checkable

from rlcore.errors import RewardError, RlcoreError
from rlcore.rewards.base import RewardFn, failed_score
from rlcore.types import Prompt, Rollout, Score


@runtime_checkable
class Closeable(Protocol):
    """Reward that holds processes."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class WeightedTerm:
    """Reward term. A value below ``gate`` sets the total to ``below_gate``.

    ``data`` names the data sets whose rollouts it scores; empty means all.
    """

    reward: RewardFn
    weight: float
    gate: float | None = None
    below_gate: float = 0.0
    data: tuple[str, ...] = ()

    def applies_to(self, prompt: Prompt) -> bool:
        """Return True if the term scores the completions of ``prompt``."""
        return not self.data or prompt.dataset in self.data


class WeightedReward:
    """Weighted reward, ``value = Σ weight · term``; ``terms`` holds each term before weighting.

    Turn rewards are weighted likewise. If a term is below its gate, the total is that gate's ``below_gate``; the first
    closed gate counts, also if a later term is unscored. If a term is otherwise unscored or NaN, so is the total,
    because a sum over other terms would be another reward. An exception inside a term leaves the whole batch unscored.
    Without any term, every total is 0. A ``with`` block stops the processes of its terms.
    """

    name = "mix"

    def __init__(self, terms: Sequence[WeightedTerm]) -> None:
        self._terms = tuple(terms)
        self._names = {term.reward.name for term in self._terms}

    def __enter__(self) -> WeightedReward:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        """Score a batch.

        Raises:
            RewardError: A value is infinite, or a term returned a wrong number of scores.
        """
        if not self._terms:
            return [Score(value=0.0, terms={}) for _ in rollouts]
        columns = [_column(term, rollouts) for term in self._terms]
        return [self._total(row) for row in zip(*columns, strict=True)] if rollouts else []

    @property
    def terms(self) -> tuple[WeightedTerm, ...]:
        return self._terms

    def close(self) -> None:
        for term in self._terms:
            if isinstance(term.reward, Closeable):
                term.reward.close()

    def _total(self, scores: Sequence[Score | None]) -> Score:
        total, terms, errors, closed = 0.0, dict[str, float](), list[str](), list[float]()
        turn_rewards: list[float] = []
        is_undecided = False  # an unscored term has a gate of unknown state
        pairs = zip(self._terms, scores, strict=True)
        present = [(term, score) for term, score in pairs if score and term.reward.name not in score.skipped]
        if not present:
            return failed_score("no reward applies to it")
        skipped = tuple(sorted(self._names - {term.reward.name for term, _ in present}))
        for term, score in present:
            error = _term_error(term.reward.name, score)
            if error or score.value is None:
                errors.append(error)
                is_undecided |= term.gate is not None and not closed
                continue
            terms |= score.terms
            total += term.weight * score.value
            weighted = [term.weight * reward for reward in score.turn_rewards]
            turn_rewards = [sum(pair) for pair in zip_longest(turn_rewards, weighted, fillvalue=0.0)]
            if term.gate is not None and score.value < term.gate:
                closed.append(term.below_gate)
        if closed and not is_undecided:
            return Score(value=closed[0], terms=terms, skipped=skipped)
        if errors:
            return Score(value=None, terms=terms, error="; ".join(errors), skipped=skipped)
        return Score(value=total, terms=terms, turn_rewards=tuple(turn_rewards), skipped=skipped)


def _column(term: WeightedTerm, rollouts: Sequence[Rollout]) -> list[Score | None]:
    indices = [index for index, rollout in enumerate(rollouts) if term.applies_to(rollout.prompt)]
    column: list[Score | None] = [None] * len(rollouts)
    found = scores_of(term.reward, [rollouts[place] for place in indices]) if indices else []
    for index, score in zip(indices, found, strict=True):
        column[index] = score
    return column


def scores_of(reward: RewardFn, rollouts: Sequence[Rollout]) -> list[Score]:
    """Return one score each. If the reward raises, none has a value.

    Raises:
        RewardError: The reward returned a wrong number of scores.
    """
    try:
        scores = reward(rollouts)
    except RlcoreError:
        raise
    except Exception as error:  # noqa: BLE001 - counted as an error per rollout, never as 0
        return [failed_score(f"{type(error).__name__}: {error}")] * len(rollouts)
    if len(scores) != len(rollouts):
        raise RewardError(f"{reward.name} returned {len(scores)} scores for {len(rollouts)} rollouts")
    return scores


_TERM_DETAIL = re.compile(r"_(?:std|prompt_tokens|completion_tokens)$")  # reported by a term besides its value


def term_statistics(scored: Sequence[Score], *, all_scores: Sequence[Score]) -> dict[str, float]:
    """Return mean, population std and fraction of zeros over ``scored``, unscored fraction over ``all_scores``.

    The keys are ``reward/term/<name>``, ``reward/term_std/<name>``, ``reward/term_zero/<name>`` and
    ``reward/term_unscored/<name>``. Values are before weighting and gates. Rollouts that a term does not apply to are
    not counted.
    """
    metrics = dict[str, float]()
    for name in sorted({name for score in scored for name in score.terms}):
        values = [score.terms[name] for score in scored if name in score.terms]
        mean = sum(values) / len(values)
        metrics[f"reward/term/{name}"] = mean
        metrics[f"reward/term_std/{name}"] = math.sqrt(sum((value - mean) ** 2 for value in values) / len(values))
        metrics[f"reward/term_zero/{name}"] = values.count(0.0) / len(values)
        applicable = [score for score in all_scores if _TERM_DETAIL.sub("", name) not in score.skipped]
        metrics[f"reward/term_unscored/{name}"] = sum(name not in score.terms for score in applicable) / len(applicable)
    return metrics


def _term_error(name: str, score: Score) -> str:
    if score.value is None:
        return f"{name}: {score.error}"
    if math.isnan(score.value):
        return f"{name}: the score is not a number"
    if math.isinf(score.value):
        raise RewardError(f"{name} returned an infinite score", fix="bound the reward: clip, or a finite failure value")
    return ""

"""Audit of rewards: score single completions again by each term, and recompute the weighted sum."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from rlcore.checks.canaries.known_answers import prompts_for
from rlcore.rewards.base import VERIFIERS, RewardFn
from rlcore.rewards.mix import WeightedReward, WeightedTerm, scores_of
from rlcore.rewards.reward_model import RewardModelReward
from rlcore.rewards.user_function import FunctionReward
from rlcore.types import Prompt, Rollout, Score, ScoredRollout

_EXACT = 1e-6
_ROUNDED = 0.1  # of the standard deviation of a reward model's scores: rounding depends on the batch shape


def known_prompts(reward: WeightedReward, prompts: Sequence[Prompt]) -> list[Prompt]:
    """Return prompts for which right and wrong answers of a reward term are known."""
    found = [
        prompt
        for term in reward.terms
        if term.reward.name in VERIFIERS
        for prompt in prompts_for(term.reward.name, [each for each in prompts if term.applies_to(each)])
    ]
    return list(dict.fromkeys(found))


@contextmanager
def preserve_rng_state() -> Iterator[None]:
    """Restore all random generators on exit, so that the audit changes no draw of the run."""
    kept = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(kept[0])
        np.random.set_state(kept[1])
        torch.set_rng_state(kept[2])


class RewardAudit:
    """Scores the terms of a reward again; ``log`` receives a message on a term that cannot be audited.

    A custom function may depend on the whole batch, or be random. Such a term is left out from then on, and the sum
    uses its recorded value.
    """

    def __init__(self, reward: WeightedReward, log: Callable[[str], None]) -> None:
        self._reward, self._log = reward, log
        self._left_out: set[str] = set()

    def error(self, item: ScoredRollout, everyone: Sequence[ScoredRollout]) -> tuple[str, str, str] | None:
        """Return what is wrong with the score of ``item``, with expected and actual value, or None.

        ``everyone``: all rollouts that were scored together with it, in that order.
        """
        with preserve_rng_state():
            terms = [term for term in self._reward.terms if term.applies_to(item.rollout.prompt)]
            found: dict[str, Score] = {}
            for term in terms:
                trained, again = _recorded(item.score, term), None
                if term.reward.name not in self._left_out and trained is not None:
                    again = self._score_alone(term.reward, item, trained, everyone)
                if again is not None and trained is not None and not _alike(term.reward, again.value, trained):
                    return f"the reward {term.reward.name!r}", f"{again.value:.6g}", f"{trained:.6g}"
                if again is not None:
                    found[term.reward.name] = again
            return _total_error(item.score, terms, found)

    def _score_alone(
        self, reward: RewardFn, item: ScoredRollout, trained: float, everyone: Sequence[ScoredRollout]
    ) -> Score | None:
        """Return the score of a single completion, or None if it cannot be compared with the recorded one."""
        (score,) = scores_of(reward, [item.rollout])
        if score.value is None or _alike(reward, score.value, trained):
            return score if score.value is not None else None
        for _ in range(2):
            (again,) = scores_of(reward, [item.rollout])
            if again.value is None or not _alike(reward, again.value, score.value):
                self._leave_out(reward, "scores the same completion differently each time")
                return None
        if isinstance(reward, FunctionReward) and _depends_on_batch(reward, everyone):
            self._leave_out(reward, "scores a completion depending on its batch")
            return None
        return score

    def _leave_out(self, reward: RewardFn, why: str) -> None:
        self._left_out.add(reward.name)
        self._log(f"the reward {reward.name!r} {why}: no longer audited")


def _recorded(score: Score, term: WeightedTerm) -> float | None:
    """Return the term's recorded value, or None if the rollout was not scored."""
    return score.terms.get(term.reward.name) if score.value is not None else None


def _depends_on_batch(reward: RewardFn, everyone: Sequence[ScoredRollout]) -> bool:
    """Return True if the whole batch, reversed, reproduces the recorded values: single scores then differ by batch."""
    kept = [item for item in everyone if reward.name in item.score.terms]
    rollouts: list[Rollout] = [item.rollout for item in reversed(kept)]
    again = reversed(scores_of(reward, rollouts))
    pairs = [(score.value, item.score.terms[reward.name]) for score, item in zip(again, kept, strict=True)]
    return all(value is None or _alike(reward, value, trained) for value, trained in pairs)


def _alike(reward: RewardFn, one: float | None, other: float) -> bool:
    tolerance = _ROUNDED if isinstance(reward, RewardModelReward) else _EXACT * max(1.0, abs(other))
    return one is not None and abs(one - other) <= tolerance


def _total_error(score: Score, terms: Sequence[WeightedTerm], found: dict[str, Score]) -> tuple[str, str, str] | None:
    """Return an error if the weighted sum and gates do not give the recorded total."""
    if score.value is None:
        return None
    values = {name: each.value for name, each in found.items()}
    known = {term.reward.name: values.get(term.reward.name, _recorded(score, term)) for term in terms}
    closed = [
        term.below_gate
        for term in terms
        if term.gate is not None and (value := known[term.reward.name]) is not None and value < term.gate
    ]
    if not closed and any(value is None for value in known.values()):
        missing = next(name for name, value in known.items() if value is None)
        return f"the reward term {missing!r}", "a value", "none, but the sum has one"
    total = closed[0] if closed else sum(term.weight * (known[term.reward.name] or 0.0) for term in terms)
    slack = sum(abs(term.weight) * _ROUNDED for term in terms if isinstance(term.reward, RewardModelReward))
    if abs(total - score.value) > slack + _EXACT * max(1.0, abs(total)):
        return "the sum of the reward terms", f"{total:.6g}", f"{score.value:.6g}"
    return None

"""The rewards of a few rollouts once more: each term is asked about one completion alone, and the sum is made anew."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from rlcore.checks.canaries.known_answers import prompts_for
from rlcore.checks.canaries.rewards import VERIFIERS
from rlcore.rewards.base import RewardFn
from rlcore.rewards.mix import WeightedReward, WeightedTerm, scores_of
from rlcore.rewards.reward_model import RewardModelReward
from rlcore.rewards.user_function import FunctionReward
from rlcore.types import Prompt, Rollout, Score, ScoredRollout

_EXACT = 1e-6
_ROUNDED = 0.1  # of the standard deviation of a reward model's scores: a batch of another shape rounds otherwise


def known_prompts(reward: WeightedReward, prompts: Sequence[Prompt]) -> list[Prompt]:
    """Prompts for which a term of the reward is known to say right and wrong."""
    found = [
        prompt
        for part in reward.parts
        if part.reward.name in VERIFIERS
        for prompt in prompts_for(part.reward.name, [each for each in prompts if part.is_on(each)])
    ]
    return list(dict.fromkeys(found))


@contextmanager
def preserve_rng_state() -> Iterator[None]:
    """What is called here draws from generators that are put back: it changes no draw of the run."""
    kept = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(kept[0])
        np.random.set_state(kept[1])
        torch.set_rng_state(kept[2])


class RewardAudit:
    """Asks the terms of a reward again; ``log`` is told of a term that cannot be asked alone.

    A user's function may look at a whole batch, or answer otherwise each time. Such a term is left out from there on,
    and the sum is made of what it said before.
    """

    def __init__(self, reward: WeightedReward, log: Callable[[str], None]) -> None:
        self._reward, self._log = reward, log
        self._left_out: set[str] = set()

    def error(self, item: ScoredRollout, everyone: Sequence[ScoredRollout]) -> tuple[str, str, str] | None:
        """What is wrong with the score of ``item``: what it is of, the value expected, and that found; None: nothing.

        ``everyone``: all that was scored together with it, in that order.
        """
        with preserve_rng_state():
            parts = [part for part in self._reward.parts if part.is_on(item.rollout.prompt)]
            found: dict[str, Score] = {}
            for part in parts:
                trained, again = _part_of(item.score, part), None
                if part.reward.name not in self._left_out and trained is not None:
                    again = self._alone(part.reward, item, trained, everyone)
                if again is not None and trained is not None and not _alike(part.reward, again.value, trained):
                    return f"the reward {part.reward.name!r}", f"{again.value:.6g}", f"{trained:.6g}"
                if again is not None:
                    found[part.reward.name] = again
            return _total_error(item.score, parts, found)

    def _alone(
        self, reward: RewardFn, item: ScoredRollout, trained: float, everyone: Sequence[ScoredRollout]
    ) -> Score | None:
        """The score of one completion asked alone; None where that says nothing of the one that was trained on."""
        (score,) = scores_of(reward, [item.rollout])
        if score.value is None or _alike(reward, score.value, trained):
            return score if score.value is not None else None
        for _ in range(2):
            (again,) = scores_of(reward, [item.rollout])
            if again.value is None or not _alike(reward, again.value, score.value):
                self._leave_out(reward, "scores the same completion differently each time")
                return None
        if isinstance(reward, FunctionReward) and _holds_in_another_order(reward, everyone):
            self._leave_out(reward, "scores a completion by what else is in its batch")
            return None
        return score

    def _leave_out(self, reward: RewardFn, why: str) -> None:
        self._left_out.add(reward.name)
        self._log(f"the reward {reward.name!r} {why}: the audit leaves its values out from here on")


def _part_of(score: Score, part: WeightedTerm) -> float | None:
    """What the term gave when the iteration was scored; None where it was not scored."""
    return score.terms.get(part.reward.name) if score.value is not None else None


def _holds_in_another_order(reward: RewardFn, everyone: Sequence[ScoredRollout]) -> bool:
    """Whether the whole batch from behind gives each rollout what it was trained on: then the batch is what differs."""
    kept = [item for item in everyone if reward.name in item.score.terms]
    rollouts: list[Rollout] = [item.rollout for item in reversed(kept)]
    again = reversed(scores_of(reward, rollouts))
    pairs = [(score.value, item.score.terms[reward.name]) for score, item in zip(again, kept, strict=True)]
    return all(value is None or _alike(reward, value, trained) for value, trained in pairs)


def _alike(reward: RewardFn, one: float | None, other: float) -> bool:
    tolerance = _ROUNDED if isinstance(reward, RewardModelReward) else _EXACT * max(1.0, abs(other))
    return one is not None and abs(one - other) <= tolerance


def _total_error(score: Score, parts: Sequence[WeightedTerm], found: dict[str, Score]) -> tuple[str, str, str] | None:
    """Whether the weighted sum behind the gates is what was trained on."""
    if score.value is None:
        return None
    values = {name: each.value for name, each in found.items()}
    known = {part.reward.name: values.get(part.reward.name, _part_of(score, part)) for part in parts}
    closed = [
        part.below_gate
        for part in parts
        if part.gate is not None and (value := known[part.reward.name]) is not None and value < part.gate
    ]
    if not closed and any(value is None for value in known.values()):
        missing = next(name for name, value in known.items() if value is None)
        return f"the reward's part {missing!r}", "a value", "none, and the sum is scored all the same"
    total = closed[0] if closed else sum(part.weight * (known[part.reward.name] or 0.0) for part in parts)
    slack = sum(abs(part.weight) * _ROUNDED for part in parts if isinstance(part.reward, RewardModelReward))
    if abs(total - score.value) > slack + _EXACT * max(1.0, abs(total)):
        return "the sum of the reward's parts", f"{total:.6g}", f"{score.value:.6g}"
    return None

"""Audit of rewards and of evaluations on held-out problems.

Single completions are scored again by each term; the weighted sum and an evaluation's metrics are recomputed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from statistics import NormalDist
from typing import TYPE_CHECKING

import numpy as np
import torch

from rlcore.checks.audit import Discrepancy
from rlcore.checks.canaries.known_answers import prompts_for
from rlcore.rewards.base import VERIFIERS, RewardFn
from rlcore.rewards.mix import WeightedReward, WeightedTerm, scores_of
from rlcore.rewards.reward_model import RewardModelReward
from rlcore.rewards.user_function import FunctionReward
from rlcore.sampling.base import replicas_of
from rlcore.sampling.scripted import ScriptedSampler
from rlcore.seeding import shuffled
from rlcore.types import CORRECT_FROM, FailedRollout, Prompt, Rollout, Score, ScoredRollout

if TYPE_CHECKING:
    from rlcore.components import Components, HeldOut


_FIX = "check how answers are sampled, graded and counted; nothing may be decided by this evaluation"
_FLAT = {True: (1.0, 0.05), False: (0.01, 0.0)}  # by half precision: slack in nats, fraction of tokens beyond it
Answers = Sequence[Sequence[Rollout | FailedRollout]]
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
        """Return the score of a single completion; None if it cannot be compared."""
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


def accuracy_errors(
    held_out: HeldOut, groups: Answers, scores: Sequence[Score], metrics: Mapping[str, float]
) -> Iterator[Discrepancy]:
    """Yield discrepancies of the metrics of an evaluation from its recorded answers and scores."""
    wrong = [
        (asked, group)
        for asked, group in zip(held_out.prompts, groups, strict=True)
        for made in group
        if (made.prompt.prompt_id, made.prompt.reference) != (asked.prompt_id, asked.reference)
    ]
    if wrong:
        asked, (made, *_) = wrong[0]
        shown = f"{made.prompt.prompt_id!r} with reference {made.prompt.reference!r}"
        expected = f"{asked.prompt_id!r} with reference {asked.reference!r}"
        yield Discrepancy("a held-out problem", expected, shown, fix=_FIX)
    by_data: dict[str, list[bool]] = {}
    for asked, score in zip(held_out.prompts, scores, strict=True):
        bound = held_out.correct_from.get(asked.dataset, CORRECT_FROM)
        by_data.setdefault(asked.dataset, []).append(score.value is not None and score.value >= bound)
    right, count = sum(map(sum, by_data.values())), len(scores)
    low, high = _bounds(right, count, held_out.confidence)
    names = {name: sum(own) / len(own) for name, own in by_data.items()} if len(by_data) > 1 else {}
    wanted = {"eval/accuracy": right / count, "eval/accuracy_low": low, "eval/accuracy_high": high}
    wanted |= {"eval/failed": float(sum(bool(score.error) for score in scores))}
    wanted |= {f"eval/data/{name}": value for name, value in names.items()}
    for name, value in wanted.items():
        found = metrics.get(name, math.nan)
        if not abs(found - value) <= 1e-9:
            summary = f"{name} by {right} right answers of {count}"
            yield Discrepancy(summary, f"{value:.6g}", f"{found:.6g}", fix=_FIX)


def _bounds(right: int, count: int, confidence: float) -> tuple[float, float]:
    """Return both p at which the fraction of right answers is z standard errors from p (Wilson 1927)."""
    z = NormalDist().inv_cdf((1.0 + confidence) / 2.0)
    a, b, c = count + z * z, -(2.0 * right + z * z), right * right / count
    root = math.sqrt(max(0.0, b * b - 4.0 * a * c))
    return max(0.0, (-b - root) / (2.0 * a)), min(1.0, (-b + root) / (2.0 * a))


class EvaluationAudit:
    """Audit of the evaluations of a run: every accuracy, and within the time budget a few answers."""

    def __init__(self, components: Components, held_out: HeldOut, log: Callable[[str], None]) -> None:
        self._components, self._held_out, self._is_first = components, held_out, True
        self._rewards = RewardAudit(held_out.verifier, log)
        self._is_sampled = not any(isinstance(each, ScriptedSampler) for each in replicas_of(components.engine))

    def errors(
        self, groups: Answers, scores: Sequence[Score], metrics: Mapping[str, float], *, has_room: bool
    ) -> Iterator[Discrepancy]:
        """Yield discrepancies of an evaluation; the answers of the first one are audited without room in the budget."""
        components = self._components
        yield from accuracy_errors(self._held_out, groups, scores, metrics)
        if not (self._is_first or has_room):
            return
        self._is_first = False
        pairs = zip(chain(*groups), scores, strict=True)
        items = [ScoredRollout(rollout=made, score=score) for made, score in pairs if isinstance(made, Rollout)]
        order = shuffled(len(items), components.seed, "audit", "answers", components.learner.policy_version)
        chosen = [items[number] for number in order[: components.health.audit.rollouts]]
        for item in chosen:
            yield from self._text_errors(item)
            if error := self._rewards.error(item, chosen):
                summary, expected, actual = f"{error[0]} of a held-out answer", *error[1:]
                yield Discrepancy(summary, expected, actual, rollout=item, fix=_FIX)
            if self._is_sampled and item.rollout.policy_version == components.learner.policy_version:
                yield from self._greedy_errors(item)

    def _text_errors(self, item: ScoredRollout) -> Iterator[Discrepancy]:
        start, end = item.rollout.turns[-1]
        text = self._components.tokenizer.decode(item.rollout.completion_ids[start:end])
        if text != item.rollout.text and item.rollout.num_sampled is None:
            found, wanted = repr(item.rollout.text[:80]), repr(text[:80])
            yield Discrepancy("a graded text", wanted, found, rollout=item, fix=_FIX)

    def _greedy_errors(self, item: ScoredRollout) -> Iterator[Discrepancy]:
        """Yield a discrepancy if tokens are not the likeliest, whose probability is at least exp(-entropy)."""
        learner = self._components.learner
        is_half = self._components.coarser_dtype.itemsize < 4
        slack, share = _FLAT[is_half]
        columns = zip(*map(torch.Tensor.tolist, learner.scores([item.rollout])), item.rollout.loss_mask, strict=True)
        below = [logprob < -entropy - slack for logprob, entropy, own in columns if own]
        if sum(below) > share * len(below):
            summary = f"{sum(below)} of {len(below)} tokens of a held-out answer are not the likeliest"
            yield Discrepancy(summary, rollout=item, fix="evaluate greedily, with the learner's weights")

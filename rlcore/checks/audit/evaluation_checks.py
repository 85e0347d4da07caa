"""Audit of evaluations on held-out problems: recompute the accuracy, and grade and score a few answers again."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from statistics import NormalDist
from typing import TYPE_CHECKING

import torch

from rlcore.checks.audit.discrepancy import Discrepancy
from rlcore.checks.audit.reward_terms import RewardAudit
from rlcore.sampling.base import replicas_of
from rlcore.sampling.scripted import ScriptedSampler
from rlcore.seeding import shuffled
from rlcore.types import CORRECT_FROM, FailedRollout, Rollout, Score, ScoredRollout

if TYPE_CHECKING:
    from rlcore.components import Components, HeldOut

_FIX = "check how answers are sampled, graded and counted; nothing may be decided by this evaluation"
_FLAT = {True: (1.0, 0.05), False: (0.01, 0.0)}  # by half precision: slack in nats, fraction of tokens beyond it
Answers = Sequence[Sequence[Rollout | FailedRollout]]


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
        summary, expected = "a held-out problem", f"{asked.prompt_id!r} with reference {asked.reference!r}"
        yield Discrepancy(summary=summary, expected=expected, actual=shown, fix=_FIX)
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
            yield Discrepancy(summary=summary, expected=f"{value:.6g}", actual=f"{found:.6g}", fix=_FIX)


def _bounds(right: int, count: int, confidence: float) -> tuple[float, float]:
    """Return both p at which the fraction of right answers is z standard errors from p (Wilson 1927)."""
    z = NormalDist().inv_cdf((1.0 + confidence) / 2.0)
    a, b, c = count + z * z, -(2.0 * right + z * z), right * right / count
    root = math.sqrt(max(0.0, b * b - 4.0 * a * c))
    return max(0.0, (-b - root) / (2.0 * a)), min(1.0, (-b + root) / (2.0 * a))


class EvaluationAudit:
    """Audit of the evaluations of a run: every accuracy, and within the time budget a few answers."""

    def __init__(self, components: Components, log: Callable[[str], None]) -> None:
        self._components, self._is_first = components, True
        self._rewards = RewardAudit(components.held_out.verifier, log) if components.held_out else None
        self._is_sampled = not any(isinstance(each, ScriptedSampler) for each in replicas_of(components.engine))

    def errors(
        self, groups: Answers, scores: Sequence[Score], metrics: Mapping[str, float], *, has_room: bool
    ) -> Iterator[Discrepancy]:
        """Yield discrepancies of an evaluation; the answers of the first one are audited without room in the budget."""
        components, held_out = self._components, self._components.held_out
        if held_out is None or self._rewards is None:
            return
        yield from accuracy_errors(held_out, groups, scores, metrics)
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
                yield Discrepancy(summary=summary, expected=expected, actual=actual, rollout=item, fix=_FIX)
            if self._is_sampled and item.rollout.policy_version == components.learner.policy_version:
                yield from self._greedy_errors(item)

    def _text_errors(self, item: ScoredRollout) -> Iterator[Discrepancy]:
        start, end = item.rollout.turns[-1]
        text = self._components.tokenizer.decode(item.rollout.completion_ids[start:end])
        if text != item.rollout.text and item.rollout.num_sampled is None:
            found, wanted = repr(item.rollout.text[:80]), repr(text[:80])
            yield Discrepancy(summary="a graded text", expected=wanted, actual=found, rollout=item, fix=_FIX)

    def _greedy_errors(self, item: ScoredRollout) -> Iterator[Discrepancy]:
        """Yield a discrepancy if tokens are not the likeliest, whose probability is at least exp(-entropy)."""
        learner = self._components.learner
        is_half = min(self._components.engine_dtype.itemsize, learner.facts.compute_dtype.itemsize) < 4
        slack, share = _FLAT[is_half]
        columns = zip(*map(torch.Tensor.tolist, learner.scores([item.rollout])), item.rollout.loss_mask, strict=True)
        below = [logprob < -entropy - slack for logprob, entropy, own in columns if own]
        if sum(below) > share * len(below):
            summary = f"{sum(below)} of {len(below)} tokens of a held-out answer are not the likeliest"
            yield Discrepancy(summary=summary, rollout=item, fix="evaluate greedily, with the learner's weights")

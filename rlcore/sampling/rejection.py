"""Rejection sampling of demonstrations from scored answers, and the curriculum of prompts by their pass rates.

In this order, unusable answers (unscored, truncated, blank) are dropped, then those below the threshold, then
duplicates and all but a prompt's best, up to a cap. Per task, prompts alternate up to another cap, best answers first.
Every dropped answer has exactly one reason.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, groupby, pairwise
from typing import Literal, TypeVar

import torch

from rlcore.config import RejectionConfig
from rlcore.evaluation.intervals import Interval, accuracy, mean_fraction
from rlcore.seeding import derive_seed, generator

Item = TypeVar("Item")
_STEPS = 2**31  # resolution of the offset, an integer number of steps: all arithmetic is exact
REASONS = (
    "unscored",
    "truncated",
    "unusable",
    "below_threshold",
    "duplicate",
    "over_prompt_cap",
    "over_task_cap",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """Sampled answer.

    Attributes:
        value: Its reward, or None if the grader failed.
        is_usable: Its text can be a demonstration (not blank, no control token as text).
        calls: Turns before ``text``, the last one, each with its tool output.
    """

    prompt_id: str
    task: str
    sample_index: int
    text: str
    num_tokens: int
    value: float | None
    is_finished: bool
    is_usable: bool
    calls: tuple[tuple[str, str], ...] = ()

    @property
    def transcript(self) -> str:
        """Text of all turns and tool outputs."""
        return "\n".join([*(text for call in self.calls for text in call), self.text])


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Kept candidates, in their order, and the number dropped for each reason of ``REASONS``."""

    kept: tuple[Candidate, ...]
    dropped: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class RejectionStats:
    """Statistics of the answers to a set of prompts.

    Attributes:
        verified: Scores at or above the threshold.
        pass_rate: Mean over prompts of the fraction of verified answers, with its bootstrap interval over prompts.
        solved: Fraction of prompts with a verified answer, with its Wilson interval.
    """

    num_prompts: int
    sampled: int
    verified: int
    kept: int
    pass_rate: Interval
    solved: Interval


def select(candidates: Sequence[Candidate], config: RejectionConfig, *, seed: int) -> Selection:
    """Select the answers to keep. ``seed`` decides which prompts come first if a task exceeds its cap.

    The candidates of a prompt must be adjacent. ``len(candidates) == len(kept) + sum(dropped.values())``.
    """
    reasons: dict[Candidate, str] = {}
    for _, group in groupby(candidates, key=lambda one: one.prompt_id):
        reasons |= _drop_reasons(list(group), config)
    chosen = [one for one in candidates if not reasons[one]]
    if config.keep_per_task:
        best_first = sorted(chosen, key=_preference(config))
        reasons |= dict.fromkeys(_over_task_cap(best_first, config, seed), "over_task_cap")
    counts = Counter(reason for reason in reasons.values() if reason)
    kept = tuple(one for one in candidates if not reasons[one])
    return Selection(kept=kept, dropped={reason: counts[reason] for reason in REASONS})


def is_verified(candidate: Candidate, config: RejectionConfig) -> bool:
    """Return True if an answer has a score that reaches the threshold."""
    return candidate.value is not None and candidate.value >= config.threshold


def summarize(
    candidates: Sequence[Candidate],
    kept: Iterable[Candidate],
    config: RejectionConfig,
    *,
    seed: int,
    confidence: float = 0.95,
) -> RejectionStats:
    """Return the statistics of at least one answer; ``confidence``: of the intervals.

    Raises:
        DataError: There are no candidates.
    """
    shares = [
        [is_verified(one, config) for one in group] for _, group in groupby(candidates, key=lambda one: one.prompt_id)
    ]
    return RejectionStats(
        num_prompts=len(shares),
        sampled=len(candidates),
        verified=sum(map(sum, shares)),
        kept=len(list(kept)),
        pass_rate=mean_fraction([sum(share) / len(share) for share in shares], seed=seed, confidence=confidence),
        solved=accuracy([any(share) for share in shares], confidence=confidence),
    )


def normalised(text: str) -> str:
    """Collapse white space to single blanks. Answers that are then equal are duplicates."""
    return " ".join(text.split())


def _drop_reasons(group: Sequence[Candidate], config: RejectionConfig) -> dict[Candidate, str]:
    reasons = {one: _unfit(one, config) for one in group}
    kept: list[Candidate] = []
    for one in sorted((one for one in group if not reasons[one]), key=_preference(config)):
        reasons[one] = _redundant(one, kept, config)
        if not reasons[one]:
            kept.append(one)
    return reasons


def _unfit(one: Candidate, config: RejectionConfig) -> str:
    if one.value is None:
        return "unscored"
    if not one.is_finished:
        return "truncated"
    if not one.is_usable:
        return "unusable"
    return "" if config.choose == "best" or is_verified(one, config) else "below_threshold"


def _preference(config: RejectionConfig) -> Callable[[Candidate], tuple[float, int, int]]:
    def key(one: Candidate) -> tuple[float, int, int]:
        value = one.value or 0.0
        return (
            -value if config.choose == "best" else 0.0,
            one.num_tokens if config.prefer == "shortest" else 0,
            one.sample_index,
        )

    return key


def _redundant(one: Candidate, kept: Sequence[Candidate], config: RejectionConfig) -> str:
    text = normalised(one.transcript)
    others = [normalised(other.transcript) for other in kept]
    if text in others:
        return "duplicate"
    return "over_prompt_cap" if len(kept) >= config.keep_per_prompt else ""


def _over_task_cap(best_first: Sequence[Candidate], config: RejectionConfig, seed: int) -> list[Candidate]:
    """Return answers beyond a task's cap: every prompt's best precedes any second best."""
    turns: Counter[str] = Counter()
    ranked: list[tuple[str, int, int, Candidate]] = []
    for one in best_first:
        ranked.append((one.task, turns[one.prompt_id], derive_seed(seed, "rejection", one.prompt_id), one))
        turns[one.prompt_id] += 1
    ranked.sort(key=lambda entry: entry[:3])
    taken: Counter[str] = Counter()
    over = []
    for task, _, _, one in ranked:
        taken[task] += 1
        if taken[task] > config.keep_per_task:
            over.append(one)
    return over


@dataclass(frozen=True, kw_only=True, slots=True)
class PassCount:
    """``passed`` of ``answers`` > 0 answers to a prompt were correct."""

    passed: int
    answers: int

    @property
    def pass_rate(self) -> float:
        return self.passed / self.answers


def learnability(tried: PassCount) -> Fraction:
    """Return the posterior mean of p(1 - p), the variance of a 0/1 reward with pass rate p; the prior of p is uniform.

    It is ab / ((a + b)(a + b + 1)), a = passed + 1, b = answers - passed + 1: 9 / 110 for a prompt solved 0 times in 8.
    """
    a, b = tried.passed + 1, tried.answers - tried.passed + 1
    return Fraction(a * b, (a + b) * (a + b + 1))


def repeat_counts(weights: Sequence[Fraction], *, seed: int) -> list[int]:
    """Return how often each item occurs in an epoch: the rarest once, others in proportion to their weight > 0.

    A fractional ratio is rounded up or down, so that its mean over seeds is the ratio (systematic sampling, Madow
    1949).
    """
    if not weights:
        return []
    rarest = min(weights)
    offset = Fraction(int(torch.randint(_STEPS, (1,), generator=generator(seed, "draw"))), _STEPS)
    ends = accumulate((weight / rarest for weight in weights), initial=offset)
    return [math.floor(end) - math.floor(start) for start, end in pairwise(ends)]


def sample_by_difficulty(
    items: Sequence[Item],
    tried: Sequence[PassCount | None],
    *,
    band: tuple[float, float],
    weight: Literal["even", "learnability"],
    seed: int,
) -> list[Item]:
    """Return the items of an epoch, repeated as often as they occur, in their order.

    Args:
        tried: Counts of each item. An item with None is not sampled.
        band: Lowest and highest pass rate.
        weight: ``even`` repeats none; ``learnability`` in proportion to :func:`learnability`.
    """
    low, high = band
    known = [
        (item, found)
        for item, found in zip(items, tried, strict=True)
        if found is not None and low <= found.pass_rate <= high
    ]
    if weight == "even":
        return [item for item, _ in known]
    counts = repeat_counts([learnability(found) for _, found in known], seed=seed)
    return [item for (item, _), count in zip(known, counts, strict=True) for _ in range(count)]

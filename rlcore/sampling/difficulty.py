"""Pass rates of prompts, and the curriculum that samples prompts by them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import Literal, TypeVar

import torch

from rlcore.seeding import generator

Item = TypeVar("Item")
_STEPS = 2**31  # resolution of the offset, an integer number of steps: all arithmetic is exact


@dataclass(frozen=True, kw_only=True, slots=True)
class PassCount:
    """``passed`` of ``answers`` answers to a prompt were correct. ``answers`` is at least 1."""

    passed: int
    answers: int

    @property
    def pass_rate(self) -> float:
        """Fraction of correct answers."""
        return self.passed / self.answers


def learnability(tried: PassCount) -> Fraction:
    """Return the posterior mean of p(1 - p), the variance of a 0/1 reward with pass rate p.

    The prior of p is uniform, so the posterior is Beta(a, b) with a = passed + 1 and b = answers - passed + 1. The mean
    is ab / ((a + b)(a + b + 1)): 9 / 110 for a prompt solved 0 times in 8, and 25 / 110 for one solved 4 times.
    """
    a, b = tried.passed + 1, tried.answers - tried.passed + 1
    return Fraction(a * b, (a + b) * (a + b + 1))


def repeat_counts(weights: Sequence[Fraction], *, seed: int) -> list[int]:
    """Return how often each item occurs in an epoch: the rarest once, others in proportion to their weight > 0.

    A fractional ratio is rounded up or down, so that its mean over seeds is the ratio (systematic sampling, Madow
    1949). The total differs by at most one from the sum of the ratios.
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
        weight: ``even`` repeats no item; ``learnability`` repeats items in proportion to :func:`learnability`.
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

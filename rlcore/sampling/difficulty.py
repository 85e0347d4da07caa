"""How hard prompts are for a policy, and how often each comes where prompts are drawn by that."""

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
_STEPS = 2**31  # of the offset, which is a whole number of them: all of it is exact


@dataclass(frozen=True, kw_only=True, slots=True)
class PassCount:
    """``passed`` of ``answers`` answers to a prompt, at least one, were right."""

    passed: int
    answers: int

    @property
    def pass_rate(self) -> float:
        """The share of right answers."""
        return self.passed / self.answers


def learnability(tried: PassCount) -> Fraction:
    """The mean of p(1 - p), the variance of a 0/1 reward, over the pass rates p that the answers leave.

    Before them every p is as likely, so the rest is Beta(a, b) with a = passed + 1 and b = answers - passed + 1, and
    the mean is ab / ((a + b)(a + b + 1)). A prompt that was never solved in 8 answers keeps 9 / 110, and one that was
    solved in 4 has 25 / 110.
    """
    a, b = tried.passed + 1, tried.answers - tried.passed + 1
    return Fraction(a * b, (a + b) * (a + b + 1))


def repeat_counts(weights: Sequence[Fraction], *, seed: int) -> list[int]:
    """How often each item stands in a list in which the rarest stands once, and each in proportion to its weight > 0.

    A ratio that is no whole number is rounded up or down, so that its mean over seeds is the ratio (systematic
    sampling, Madow 1949). The whole list is at most one longer or shorter than the sum of the ratios.
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
    """The items that are drawn from, each as often as it comes in an epoch, in their order.

    ``tried``: what is known of each; None: nothing, and it is not drawn. ``band``: the lowest and the highest pass
    rate. ``weight``: ``even`` has each once, ``learnability`` in proportion to :func:`learnability`.
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

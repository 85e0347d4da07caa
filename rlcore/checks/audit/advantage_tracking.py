"""Did updates do what the advantages asked for?"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

WINDOW = 64  # updates
LEAST = 16  # before which nothing is said
STOP_AT = -7.0  # standard errors: by chance once in 500,000 windows of 16 updates that follow nothing
UNRELATED = 0.02


@dataclass(frozen=True, slots=True)
class TrackingStats:
    """How far updates followed the advantages: the mean agreement of ``count`` updates, and its standard error."""

    mean: float
    error: float
    count: int

    def __str__(self) -> str:
        half = 1.96 * self.error
        return f"{self.mean:.3f} [{self.mean - half:.3f}, {self.mean + half:.3f}] over {self.count} updates"


class AdvantageTracker:
    """Agreements of the newest updates. To first order a step raises ``sum of weight * advantage * log-probability``.

    An agreement is the correlation (about 0) of advantages with the changes of the same tokens' log-probabilities.
    """

    def __init__(self) -> None:
        self.values: list[float] = []

    def see(self, advantages: Tensor, changes: Tensor) -> None:
        """Take one update's trained tokens, [n] each; nothing is learned from tokens that do not change."""
        advantages, changes = advantages.double(), changes.double()
        size = float(advantages.norm() * changes.norm())
        if size > 0.0:
            self.values = [*self.values, float(advantages @ changes) / size][-WINDOW:]

    @property
    def course(self) -> TrackingStats | None:
        """What the window shows; None where it holds too few updates."""
        count = len(self.values)
        if count < LEAST:
            return None
        mean = sum(self.values) / count
        variance = sum((value - mean) ** 2 for value in self.values) / (count - 1)
        return TrackingStats(mean, math.sqrt(variance / count), count)

    @property
    def is_backwards(self) -> bool:
        """Whether updates do the opposite of what they should, beyond chance."""
        course = self.course
        return course is not None and course.mean < STOP_AT * max(course.error, 1e-9)

    @property
    def is_unrelated(self) -> bool:
        """Whether a whole window shows that updates follow the advantages hardly at all."""
        course = self.course
        return course is not None and course.count == WINDOW and course.mean + 1.96 * course.error < UNRELATED

"""Advantage tracking: check that updates follow the advantages."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

WINDOW = 64  # updates
MIN_UPDATES = 16
STOP_AT = -7.0  # standard errors: false alarm in one of 500,000 windows of 16 unrelated updates
UNRELATED = 0.02


@dataclass(frozen=True, slots=True)
class TrackingStats:
    """Mean correlation of ``count`` updates with their advantages, and its standard error."""

    mean: float
    error: float
    count: int

    def __str__(self) -> str:
        half = 1.96 * self.error
        return f"{self.mean:.3f} [{self.mean - half:.3f}, {self.mean + half:.3f}] over {self.count} updates"


class AdvantageTracker:
    """Correlation of advantages with changes of the same tokens' log-probabilities, over the newest updates.

    To first order a step raises ``sum of weight * advantage * log-probability``, so the correlation (about 0) is
    positive.
    """

    def __init__(self) -> None:
        self.values: list[float] = []

    def add(self, advantages: Tensor, changes: Tensor) -> None:
        """Add one update's trained tokens, [n] each. An update without changes is ignored."""
        advantages, changes = advantages.double(), changes.double()
        size = float(advantages.norm() * changes.norm())
        if size > 0.0:
            self.values = [*self.values, float(advantages @ changes) / size][-WINDOW:]

    @property
    def stats(self) -> TrackingStats | None:
        """Statistics of the window, or None with too few updates."""
        count = len(self.values)
        if count < MIN_UPDATES:
            return None
        mean = sum(self.values) / count
        variance = sum((value - mean) ** 2 for value in self.values) / (count - 1)
        return TrackingStats(mean, math.sqrt(variance / count), count)

    @property
    def is_backwards(self) -> bool:
        """True if updates oppose the advantages, beyond chance."""
        stats = self.stats
        return stats is not None and stats.mean < STOP_AT * max(stats.error, 1e-9)

    @property
    def is_unrelated(self) -> bool:
        """True if a full window shows almost no correlation."""
        stats = self.stats
        return stats is not None and stats.count == WINDOW and stats.mean + 1.96 * stats.error < UNRELATED

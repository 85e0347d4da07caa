"""Time budget of the audit: a fraction of the run's time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class TimeBudget:
    """Seconds of the audit of one run, at most a fraction of the run's; ``clock`` returns seconds."""

    def __init__(self, max_fraction: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self._max_fraction, self._clock = max_fraction, clock
        self._began, self.seconds = clock(), 0.0
        self._before = self._cost = 0.0  # seconds before the current iteration; seconds of the newest audited one

    @property
    def fraction(self) -> float:
        """Seconds of the audit as a fraction of those of the run."""
        return self.seconds / max(self._clock() - self._began, 1e-9)

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Add the seconds of a block."""
        started = self._clock()
        try:
            yield
        finally:
            self.seconds += self._clock() - started

    def begin(self) -> None:
        """Begin an iteration."""
        self._before = self.seconds

    def end(self) -> None:
        """Remember the cost of this iteration, which was audited."""
        self._cost = self.seconds - self._before

    def has_room(self) -> bool:
        """Return True if another audited iteration of the same cost stays within the fraction."""
        elapsed = self._clock() - self._began
        return self.seconds + self._cost <= self._max_fraction * (elapsed + self._cost)

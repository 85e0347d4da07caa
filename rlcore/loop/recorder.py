"""Recorder protocol for the metrics and rollouts of a run, and a recorder that writes to a log."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from rlcore.checks.health import HealthFinding
from rlcore.loop.prompt_schedule import SampledGroups
from rlcore.types import ScoredRollout

_OPTIONAL = (
    ("kl", "kl/ref", ".4f"),
    ("with_calls", "episode/with_calls", ".3f"),
    ("eval_accuracy", "eval/accuracy", ".3f"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class HealthStop:
    """A stop by a health rule after ``iteration``.

    Attributes:
        finding: The rule that stopped the run.
        iteration: Last iteration of the run.
        restored_iteration: Newest iteration that every rule confirmed as healthy, or 0. The result is this iteration.
    """

    finding: HealthFinding
    iteration: int
    restored_iteration: int

    def __str__(self) -> str:
        stop = f"stopped after iteration {self.iteration}: {self.finding}"
        return f"{stop}; the result is iteration {self.restored_iteration}. {self.finding.fix}"


class Recorder(Protocol):
    """Protocol of objects that record a run. A method that raises ends the run."""

    def log(self, text: str) -> None:
        """Show a human-readable sentence."""

    def metrics(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of an iteration, all of which are finite. docs/metrics.md explains each name."""

    def rollouts(self, iteration: int, sampled: SampledGroups[list[ScoredRollout]]) -> None:
        """Record the scored groups of an iteration: those trained on, and those that dynamic sampling replaced."""

    def stopped(self, stop: HealthStop) -> None:
        """Record that a health rule stopped the run. The last healthy checkpoint is restored already."""

    def flush(self) -> None:
        """Write all records to durable storage, before a checkpoint is written.

        A run that resumes from a checkpoint records all later iterations again.
        """


class LogRecorder:
    """Recorder that logs a line per iteration, and every note, to the logger ``rlcore``. It drops rollouts."""

    def __init__(self, num_iterations: int) -> None:
        self._num_iterations, self._logger = num_iterations, logging.getLogger("rlcore")

    def log(self, text: str) -> None:
        """Log the sentence."""
        self._logger.info("%s", text)

    def metrics(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Log the summary line of an iteration."""
        self.log(summary_line(iteration, self._num_iterations, metrics))

    def rollouts(self, iteration: int, sampled: SampledGroups[list[ScoredRollout]]) -> None:
        """Do nothing."""

    def stopped(self, stop: HealthStop) -> None:
        """Log the stop as a warning."""
        self._logger.warning("%s", stop)

    def flush(self) -> None:
        """Do nothing: log lines are written immediately."""


def summary_line(iteration: int, num_iterations: int, metrics: Mapping[str, float]) -> str:
    """Format an iteration: ``iteration 3/10 reward=0.512 length=18.0 eval_accuracy=0.400``."""
    shown = "".join(f" {label}={metrics[name]:{form}}" for label, name, form in _OPTIONAL if name in metrics)
    reward, length = metrics["reward/mean"], metrics["completion/length"]
    return f"iteration {iteration}/{num_iterations} reward={reward:.3f} length={length:.1f}{shown}"

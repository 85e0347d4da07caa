"""Where a run's figures and rollouts go: a protocol of five methods, and a recorder that writes to a log."""

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
    """What a health rule did: it ended the run after ``iteration``, and the result is that of iteration ``sound``.

    ``sound`` is the newest iteration that every rule has seen within its bound, or 0 if there is none.
    """

    finding: HealthFinding
    iteration: int
    restored_iteration: int

    def __str__(self) -> str:
        end = f"stopped after iteration {self.iteration} by {self.finding}"
        return f"{end}; the result is iteration {self.restored_iteration}. {self.finding.fix}"


class Recorder(Protocol):
    """Receives what a run reports. A method that raises ends the run."""

    def log(self, text: str) -> None:
        """Show a sentence to people."""
        ...

    def metrics(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Keep the figures of an iteration, all of which are finite. docs/metrics.md explains each name."""
        ...

    def rollouts(self, iteration: int, drawn: SampledGroups[list[ScoredRollout]]) -> None:
        """Keep the scored groups of an iteration: those trained on, and those that dynamic sampling replaced."""
        ...

    def stopped(self, stop: HealthStop) -> None:
        """Note that a health rule ended the run, and that the learner has gone back."""
        ...

    def flush(self) -> None:
        """Write what was recorded to where it outlives the process: the checkpoint that follows relies on it.

        A run that resumes from a checkpoint records again what came after it.
        """
        ...


class LogRecorder:
    """Writes a line for each iteration, and every note, to the logger ``rlcore``. It keeps no rollouts."""

    def __init__(self, num_iterations: int) -> None:
        self._num_iterations, self._logger = num_iterations, logging.getLogger("rlcore")

    def log(self, text: str) -> None:
        """Log it."""
        self._logger.info("%s", text)

    def metrics(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Log reward and length, and KL, tool calls and held-out accuracy if the iteration has them."""
        self.log(summary_line(iteration, self._num_iterations, metrics))

    def rollouts(self, iteration: int, drawn: SampledGroups[list[ScoredRollout]]) -> None:
        """Keep nothing."""

    def stopped(self, stop: HealthStop) -> None:
        """Log it as a warning."""
        self._logger.warning("%s", stop)

    def flush(self) -> None:
        """Do nothing: a log is written at once."""


def summary_line(iteration: int, num_iterations: int, metrics: Mapping[str, float]) -> str:
    """Format an iteration: ``iteration 3/10 reward=0.512 length=18.0 eval_accuracy=0.400``."""
    shown = "".join(f" {label}={metrics[name]:{form}}" for label, name, form in _OPTIONAL if name in metrics)
    reward, length = metrics["reward/mean"], metrics["completion/length"]
    return f"iteration {iteration}/{num_iterations} reward={reward:.3f} length={length:.1f}{shown}"

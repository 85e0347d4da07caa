"""Decides when a run's checkpoints are due; the learner's side writes them.

The clock decides when a checkpoint is written, never what a run computes. A killed run ends with the same weights,
whichever checkpoint it resumes from.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from rlcore.training.learner_protocol import LearnerProtocol


class Checkpoints:
    """The checkpoints of one run of ``learner`` in ``folder``.

    Only checkpoints that were made with the same ``identity`` are loaded. ``clock`` gives seconds.
    """

    def __init__(
        self,
        folder: Path,
        learner: LearnerProtocol,
        *,
        identity: Mapping[str, str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder, self._learner, self._clock, self._identity = folder, learner, clock, dict(identity)
        self._last = clock()

    def is_due(self, iteration: int) -> bool:
        """Whether a checkpoint is written after this iteration.

        One is written after the first iteration, which shows early that there is room, and gives a run something to go
        back to. One is written after the last. Between them :class:`rlcore.config.CheckpointConfig` decides.
        """
        config = self._learner.config
        if iteration in (1, config.num_iterations):
            return True
        every = config.checkpoints
        if every.every_iterations:
            return iteration % every.every_iterations == 0
        return self._clock() - self._last >= 60.0 * every.every_minutes

    def save(self, iteration: int, *, run_state: Mapping[str, Any], spared: Collection[int] = ()) -> None:
        """Write one in the background. For each iteration in ``spared``, the newest one up to it is kept.

        Raises:
            StorageError: this checkpoint or the one before could not be written. Earlier ones are untouched.
        """
        state = {**run_state, "iteration": iteration, "identity": self._identity}
        self._learner.save(self._folder, iteration, run_state=state, spared=spared)
        self._last = self._clock()

    def load(self, *, up_to: int | None = None) -> dict[str, Any] | None:
        """Restore the learner from the newest one (up to ``up_to``). Returns its run state, or None if there is none.

        Raises:
            CheckpointError: it was made with another identity, or every checkpoint is damaged.
        """
        return self._learner.load(self._folder, identity=self._identity, up_to=up_to)

    def close(self) -> None:
        """Finish what is being written."""
        self._learner.wait()

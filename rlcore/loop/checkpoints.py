"""Checkpoint schedule of a run; the learner writes the files.

The clock decides when a checkpoint is written, never what a run computes: a killed run ends with the same weights,
whichever checkpoint it resumes from.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from rlcore.errors import CheckpointError
from rlcore.training.learner_protocol import LearnerProtocol


class Checkpoints:
    """Checkpoints of one run of ``learner`` in ``folder``.

    Only checkpoints with the same ``identity`` are loaded. ``clock`` returns seconds.
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
        """Return True if a checkpoint is written after this iteration.

        The first iteration has one, which shows early whether the disk has room, and which a stopped run can restore.
        The last has one too. In between :class:`rlcore.config.CheckpointConfig` decides.
        """
        config = self._learner.config
        if iteration in (1, config.num_iterations):
            return True
        every = config.checkpoints
        if every.every_iterations:
            return iteration % every.every_iterations == 0
        return self._clock() - self._last >= 60.0 * every.every_minutes

    def save(self, iteration: int, *, run_state: Mapping[str, Any], protected: Collection[int] = ()) -> None:
        """Write a checkpoint in the background. Keep the newest one up to each iteration in ``protected``.

        Raises:
            StorageError: This checkpoint or the previous one could not be written. Earlier ones are untouched.
        """
        state = {**run_state, "iteration": iteration, "identity": self._identity}
        self._learner.save(self._folder, iteration, run_state=state, protected=protected)
        self._last = self._clock()

    def load(self, *, up_to: int | None = None) -> dict[str, Any] | None:
        """Restore the learner from the newest checkpoint (up to ``up_to``). Return its run state, or None without one.

        Raises:
            CheckpointError: It has another identity, or every checkpoint is damaged.
        """
        return self._learner.load(self._folder, identity=self._identity, up_to=up_to)

    def load_for(self, num_iterations: int) -> dict[str, Any] | None:
        """Restore the newest checkpoint; of a longer run, the one after exactly ``num_iterations``.

        Earlier ones of a longer run are not continued, because that would overwrite its history.

        Raises:
            CheckpointError: As :meth:`load`, or the run is longer and has no such checkpoint.
        """
        state = self.load()
        if state is None or state["iteration"] <= num_iterations:
            return state
        done, state = state["iteration"], self.load(up_to=num_iterations)
        if state is None or state["iteration"] != num_iterations:
            raise CheckpointError(
                f"{done} iterations are done, num_iterations = {num_iterations}, and no checkpoint after exactly "
                f"{num_iterations} is kept",
                where=str(self._folder),
                fix=f"set num_iterations to {done} or more, or name another folder to start anew",
            )
        return state

    def close(self) -> None:
        """Wait until the checkpoint is written."""
        self._learner.wait()

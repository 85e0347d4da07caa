"""When a run's checkpoints are due, and their writing beside the run.

The clock decides whether a checkpoint is written, never what a run computes: a killed run ends with the same weights
from whichever checkpoint it goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from rlcore.config import RlConfig
from rlcore.free_memory import free_bytes
from rlcore.training.checkpoint import load_newest, take_snapshot, write_checkpoint
from rlcore.training.learner import Learner

_SPARE = 2  # a copy is made only where so many times its bytes are free, so that it never is what fills the memory


class Checkpoints:
    """The checkpoints of one run in ``folder``.

    ``identity``: what a checkpoint must have been made with to be loaded; ``clock`` gives seconds.
    """

    def __init__(
        self,
        folder: Path,
        config: RlConfig,
        *,
        identity: Mapping[str, str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config, self._clock, self._identity = config, clock, dict(identity)
        self._writer = CheckpointWriter(folder)
        self._last = clock()

    def is_due(self, iteration: int) -> bool:
        """Whether one is written after this iteration.

        After the first, which shows early that there is room and is there to go back to; after the last; between them
        as :class:`rlcore.config.CheckpointConfig` says.
        """
        if iteration in (1, self._config.num_iterations):
            return True
        every = self._config.checkpoints
        if every.iterations:
            return iteration % every.iterations == 0
        return self._clock() - self._last >= 60.0 * every.minutes

    def save(
        self, iteration: int, learner: Learner, *, run_state: Mapping[str, Any], spared: Collection[int] = ()
    ) -> None:
        """Write one in the background; for each iteration in ``spared`` the newest one that is not after it stays.

        Raises:
            StorageError: this or the one before could not be written; earlier checkpoints are untouched.
        """
        state = {**run_state, "iteration": iteration, "identity": self._identity}
        self._writer.save(iteration, learner, run_state=state, spared=spared)
        self._last = self._clock()

    def load(self, learner: Learner, *, up_to: int | None = None) -> dict[str, Any] | None:
        """Restore the learner from the newest one (of ``up_to`` or before); its run state, None where there is none.

        Raises:
            CheckpointError: it was made with another identity, or every checkpoint is damaged.
        """
        self._writer.wait()
        return load_newest(self._writer.root, learner, identity=self._identity, up_to=up_to)

    def close(self) -> None:
        """Finish what is being written."""
        self._writer.close()


class CheckpointWriter:
    """Copies a learner in memory and writes the copy in a thread of its own; one checkpoint at a time.

    The copy takes as many bytes of the machine's memory as the checkpoint has on the disk. Where that much is not free
    twice over, the checkpoint is written before :meth:`save` returns, from the live tensors.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoints")  # starts with the first job
        self._last: Future[Path] | None = None

    def save(
        self, step: int, learner: Learner, *, run_state: Mapping[str, Any], keep: int = 2, spared: Collection[int] = ()
    ) -> None:
        """Begin to write the checkpoint of ``step``, after the one before is on the disk.

        Raises:
            StorageError: this or the one before could not be written; earlier checkpoints are untouched.
        """
        self.wait()
        snapshot = take_snapshot(learner, run_state=run_state)
        free = free_bytes(torch.device("cpu"))
        if free is None or free < _SPARE * snapshot.num_bytes:
            write_checkpoint(self.root, step, snapshot, keep=keep, spared=tuple(spared))
            return
        self._last = self._thread.submit(
            write_checkpoint, self.root, step, snapshot.copied(), keep=keep, spared=tuple(spared)
        )

    def wait(self) -> None:
        """Return when the newest checkpoint is on the disk.

        Raises:
            StorageError: it could not be written.
        """
        last, self._last = self._last, None
        if last is not None:
            last.result()

    def close(self) -> None:
        """Finish what is being written and end the thread.

        Raises:
            StorageError: it could not be written.
        """
        self._thread.shutdown(wait=True)
        self.wait()

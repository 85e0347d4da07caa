"""Checkpoints that are written beside the run."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from rlcore.hardware.free_memory import free_bytes
from rlcore.training.checkpoint import capture_state, write_checkpoint
from rlcore.training.learner import Learner

_SPARE = 2  # a copy is made only where so many times its bytes are free, so that it never is what fills the memory


class CheckpointWriter:
    """Copies a learner in memory and writes the copy in a thread of its own; one checkpoint at a time.

    The copy takes as many bytes of the machine's memory as the checkpoint has on the disk. Where that much is not free
    twice over, the checkpoint is written before :meth:`save` returns, from the live tensors.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoints")  # starts with the first job
        self._last: Future[Path] | None = None

    def save(
        self,
        root: Path,
        step: int,
        learner: Learner,
        *,
        run_state: Mapping[str, Any],
        protected: Collection[int] = (),
    ) -> None:
        """Begin to write the checkpoint of ``step``, after the one before is on the disk.

        Raises:
            StorageError: this or the one before could not be written; earlier checkpoints are untouched.
        """
        self.wait()
        snapshot = capture_state(learner, run_state=run_state)
        if not learner.ranks.is_first:
            return
        free = free_bytes(torch.device("cpu"))
        if free is None or free < _SPARE * snapshot.num_bytes:
            write_checkpoint(root, step, snapshot, protected=tuple(protected))
            return
        self._last = self._thread.submit(write_checkpoint, root, step, snapshot.copied(), protected=tuple(protected))

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

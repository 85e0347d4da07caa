"""Checkpoints that are written in the background."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from rlcore.hardware.memory import free_bytes
from rlcore.training.checkpoint import capture_state, write_checkpoint
from rlcore.training.learner import Learner

_SPARE = 2  # copy only if this multiple of its bytes is free, so that the copy cannot exhaust memory


class CheckpointWriter:
    """Writer that copies a learner in memory and writes the copy in a thread, one checkpoint at a time.

    The copy needs as much CPU memory as the checkpoint needs disk space. If less than twice that is free, :meth:`save`
    writes from the live tensors before it returns.
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
        """Start writing the checkpoint of ``step``, after the previous one is on disk.

        Raises:
            StorageError: This or the previous checkpoint could not be written; earlier ones are unchanged.
        """
        self.wait()
        state = capture_state(learner, run_state=run_state)
        if not learner.ranks.is_first:
            return
        free = free_bytes(torch.device("cpu"))
        if free is None or free < _SPARE * state.num_bytes:
            write_checkpoint(root, step, state, protected=tuple(protected))
            return
        self._last = self._thread.submit(write_checkpoint, root, step, state.copied(), protected=tuple(protected))

    def wait(self) -> None:
        """Wait until the newest checkpoint is on disk.

        Raises:
            StorageError: It could not be written.
        """
        last, self._last = self._last, None
        if last is not None:
            last.result()

    def close(self) -> None:
        """Finish writing and end the thread.

        Raises:
            StorageError: The checkpoint could not be written.
        """
        self._thread.shutdown(wait=True)
        self.wait()

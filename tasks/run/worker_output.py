"""Console output of a run under a worker: the run outlives its reader."""

from __future__ import annotations

import logging
import os
import sys

from prefect.logging.handlers import PrefectConsoleHandler


class WorkerOutput(PrefectConsoleHandler):
    """Prefect's console handler, with which a run survives its worker.

    ``infra/worker.py`` sets it for the runs that it starts.
    """

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, or drop it if there is no reader, which would make rich end the run."""
        try:
            super().emit(record)
        except SystemExit:  # rich has closed standard output, and writes nothing more
            os.dup2(sys.stdout.fileno(), sys.stderr.fileno())

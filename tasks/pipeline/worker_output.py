"""The output of a run that a worker reads: the run outlives its reader."""

from __future__ import annotations

import logging
import os
import sys

from prefect.logging.handlers import PrefectConsoleHandler


class WorkerOutput(PrefectConsoleHandler):
    """Prefect's handler for the console, with which a run survives its worker.

    ``infra/worker.py`` names it to the runs that it starts.
    """

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, or drop it where nobody reads: rich would end the run there."""
        try:
            super().emit(record)
        except SystemExit:  # rich has sent standard output to nowhere, and writes nothing more
            os.dup2(sys.stdout.fileno(), sys.stderr.fileno())

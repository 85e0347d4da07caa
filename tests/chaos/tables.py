"""Opens the MLflow of a new home, and dies at one statement of SQL."""

from __future__ import annotations

import os
import signal
from itertools import count

from rlcore.tasks.store.settings import configure_environment, find_home
from rlcore.tasks.tracking.runs import open_tracker


def main(arguments: list[str]) -> int:
    """Die at the statement of that number, or, for 0, begin a run."""
    from sqlalchemy import event
    from sqlalchemy.engine import Engine

    number, statements = int(arguments[0]), count(1)

    def die(*_: object) -> None:
        if next(statements) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    event.listen(Engine, "before_cursor_execute", die)
    home = find_home()
    configure_environment(home)
    tracker = open_tracker(home)
    tracker.start_run("toy", "one", tags={}).end("FINISHED")
    return 0

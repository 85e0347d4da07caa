"""Log lines of Prefect and MLflow: errors that a user can fix, and what is logged twice."""

from __future__ import annotations

import logging

from rlcore.errors import RlcoreError
from rlcore.tasks.store.disk import is_full_disk

_STORE = "mlflow.store.db.utils"
_TASKS = "prefect.task_runs"
_LOGGERS = ("prefect.flow_runs", _TASKS, _STORE)


class UserErrors(logging.Filter):
    """Filter that omits the traceback of rlcore's errors on the console and in the API.

    Prefect logs such an error for the task and again for the flow, with the whole traceback, and MLflow's store does so
    for a full disk. Other errors keep their tracebacks. The end of a task that succeeded is omitted too.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name == _TASKS and record.getMessage().startswith("Finished in state Completed"):
            return False  # the stage logs its own end, and an iteration its metrics
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, RlcoreError):
            record.exc_info = record.exc_text = None
            record.msg, record.args = f"{type(error).__name__}: {error}", ()
        elif record.name == _STORE and "database is locked" in str(error):
            return False  # its waiter reports it (rlcore.tasks.tracking.retry)
        elif error is not None and is_full_disk(error):
            record.exc_info = record.exc_text = None
            record.msg, record.args = f"the disk is full ({type(error).__name__})", ()
        return True


_USER_ERRORS = UserErrors()


def shorten_user_errors() -> None:
    """Attach :class:`UserErrors` to those loggers; a second call changes nothing."""
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(_USER_ERRORS)

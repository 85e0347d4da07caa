"""Errors for users: in log lines of Prefect and MLflow, and stops that are no failures."""

from __future__ import annotations

import logging

from rlcore.errors import RlcoreError
from rlcore.tasks.store.storage import is_full_disk

_STORE = "mlflow.store.db.utils"
_TASKS = "prefect.task_runs"
_PRINTED = "is_printed_by_command"  # a mark of log records
_LOGGERS = ("prefect.flow_runs", _TASKS, _STORE)


class UserErrors(logging.Filter):
    """Filter that omits the traceback of rlcore's errors and of a full disk, and the end of a task that succeeded.

    Prefect logs such an error for the task and again for the flow.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if record.name == _TASKS and text.startswith("Finished in state Completed"):
            return False  # the stage logs its own end, and an iteration its metrics
        if text.startswith("Finished in state Failed"):
            record.msg, record.args = text.partition("(")[0], ()  # the error itself is a line before
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, RlcoreError):
            record.exc_info = record.exc_text = None
            record.msg, record.args = f"{type(error).__name__}: {error}", ()
            setattr(record, _PRINTED, True)
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


def leave_errors_to_command() -> None:
    """Keep rlcore's errors off the console of a command, which prints them when it ends; the API has them."""
    for handler in logging.getLogger().handlers:
        handler.addFilter(_is_unprinted)


def _is_unprinted(record: logging.LogRecord) -> bool:
    return not getattr(record, _PRINTED, False)


class BudgetReachedError(RlcoreError):
    """A limit of the preset's section ``budget`` is reached; the same command with a higher one resumes."""


def is_continued(error: BaseException) -> bool:
    """Return True if an error is no failure of the run: a kill, an interruption, a reached budget."""
    return isinstance(error, BudgetReachedError) or not isinstance(error, Exception)

"""Errors of a user are one message in the logs; all others keep their traceback."""

from __future__ import annotations

import errno
import logging
import sys

from rlcore.errors import DataError
from rlcore.tasks.store.logs import UserErrors, shorten_user_errors


def logged(error: Exception, name: str = "prefect.flow_runs") -> str:
    shorten_user_errors()
    shorten_user_errors()
    logger = logging.getLogger(name)
    # Prefect's own logging set-up adds filters of its own to the same loggers.
    assert sum(isinstance(each, UserErrors) for each in logger.filters) == 1
    try:
        raise error
    except type(error):
        raised = sys.exc_info()
    record = logger.makeRecord(name, logging.ERROR, __file__, 1, "Encountered exception: %r", (error,), raised)
    assert logger.filter(record)  # not through the logger's parents, whose set-up depends on who ran before
    return logging.Formatter().format(record)


def test_an_error_of_ours_is_its_message_without_a_traceback() -> None:
    text = logged(DataError("row 3 has no prompt", where="a.jsonl"))
    assert "DataError: row 3 has no prompt\n  where: a.jsonl" in text
    assert "Traceback" not in text


def test_a_full_disk_is_said_without_a_traceback() -> None:
    text = logged(OSError(errno.ENOSPC, "No space left on device"), name="mlflow.store.db.utils")
    assert "the disk is full (OSError)" in text
    assert "Traceback" not in text


def test_an_error_that_is_nobodys_mistake_keeps_its_traceback() -> None:
    assert "Traceback" in logged(ZeroDivisionError("a bug"))

"""Errors of a user are one message in the logs; all others keep their traceback."""

from __future__ import annotations

import errno
import logging
from pathlib import Path

import pytest

from rlcore.errors import DataError, StorageError
from rlcore.tasks.store.disk import raise_on_full_disk
from rlcore.tasks.store.logs import UserErrors, shorten_user_errors


def logged(error: Exception, caplog: pytest.LogCaptureFixture, name: str = "prefect.flow_runs") -> str:
    shorten_user_errors()
    shorten_user_errors()
    logger = logging.getLogger(name)
    # Prefect's own logging set-up adds filters of its own to the same loggers.
    assert sum(isinstance(each, UserErrors) for each in logger.filters) == 1
    try:
        raise error
    except Exception as raised:
        logger.propagate = True
        with caplog.at_level(logging.ERROR, logger=name):
            logger.exception("Encountered exception during execution: %r", raised)
    return caplog.text


def test_an_error_of_ours_is_its_message_without_a_traceback(caplog: pytest.LogCaptureFixture) -> None:
    text = logged(DataError("row 3 has no prompt", where="a.jsonl"), caplog)
    assert "DataError: row 3 has no prompt\n  where: a.jsonl" in text
    assert "Traceback" not in text


def test_a_full_disk_is_said_without_a_traceback(caplog: pytest.LogCaptureFixture) -> None:
    text = logged(OSError(errno.ENOSPC, "No space left on device"), caplog, name="mlflow.store.db.utils")
    assert "the disk is full (OSError)" in text
    assert "Traceback" not in text


def test_an_error_that_is_nobodys_mistake_keeps_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    assert "Traceback" in logged(ZeroDivisionError("a bug"), caplog)


def chained(error: Exception, *, explicit: bool) -> Exception:
    try:
        try:
            raise error
        except Exception as first:
            if explicit:
                raise RuntimeError("while saving") from first
            raise RuntimeError("while saving")  # noqa: B904  (the implicit chain is the case)
    except RuntimeError as second:
        return second


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "x"),
        OSError(errno.EDQUOT, "x"),
        chained(OSError(errno.ENOSPC, "x"), explicit=True),
        chained(OSError(errno.ENOSPC, "x"), explicit=False),
        RuntimeError("(sqlite3.OperationalError) database or disk is full"),
    ],
)
def test_every_form_of_a_full_disk_becomes_one_error_that_names_the_folder(error: Exception, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="disk is full") as caught, raise_on_full_disk(tmp_path):
        raise error
    assert caught.value.where == str(tmp_path)


@pytest.mark.parametrize("error", [OSError(errno.EACCES, "x"), ValueError("full of water"), DataError("no rows")])
def test_other_errors_pass_unchanged(error: Exception, tmp_path: Path) -> None:
    with pytest.raises(type(error)) as caught, raise_on_full_disk(tmp_path):
        raise error
    assert caught.value is error

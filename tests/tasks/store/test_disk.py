"""An error that a full disk has caused is told as that, whoever raised it."""

from __future__ import annotations

import errno
import sqlite3
from pathlib import Path

import pytest

from rlcore.errors import ConfigError, StorageError
from rlcore.tasks.store.disk import is_full_disk, raise_on_full_disk


def caused_by(reason: BaseException, *, told: bool) -> RuntimeError:
    """An error raised from another, or while another was handled."""
    try:
        try:
            raise reason
        except type(reason) as first:
            if told:
                raise RuntimeError("cannot write") from first
            raise RuntimeError("cannot write")  # noqa: B904 — the context alone says why
    except RuntimeError as error:
        return error


def full_database() -> sqlite3.Error:
    """Return SQLite's error for a database that may not grow."""
    connection = sqlite3.connect(":memory:")
    connection.execute("PRAGMA max_page_count = 2")
    try:
        connection.execute("CREATE TABLE t (x)")
        connection.execute("INSERT INTO t VALUES (zeroblob(100000))")
    except sqlite3.Error as error:
        return error
    finally:
        connection.close()
    raise AssertionError("the database took it")


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "no space"),
        OSError(errno.EDQUOT, "quota"),
        full_database(),
        RuntimeError("(sqlite3.OperationalError) database or disk is full"),
        RuntimeError("SafetensorError: I/O error: No space left on device (os error 28)"),
        caused_by(OSError(errno.ENOSPC, "no space"), told=True),
        caused_by(OSError(errno.ENOSPC, "no space"), told=False),
    ],
)
def test_a_full_disk_is_known_in_each_of_its_forms(error: BaseException, tmp_path: Path) -> None:
    assert is_full_disk(error)
    with pytest.raises(StorageError, match="the disk is full") as caught, raise_on_full_disk(tmp_path):
        raise error
    assert caught.value.where == str(tmp_path)


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EACCES, "permission denied"),
        ValueError("full of water"),
        ConfigError("No space left on device is only quoted here", fix="none"),
    ],
)
def test_another_error_stays_what_it_is(error: Exception, tmp_path: Path) -> None:
    with pytest.raises(type(error)) as caught, raise_on_full_disk(tmp_path):
        raise error
    assert caught.value is error
    assert is_full_disk(error) is isinstance(error, ConfigError)  # by its words, which are an error's of ours


def test_errors_that_name_each_other_come_to_an_end() -> None:
    first, second = RuntimeError("one"), RuntimeError("two")
    first.__cause__, second.__cause__ = second, first
    assert not is_full_disk(first)

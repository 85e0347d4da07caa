"""Temporary folders that are locked as long as somebody writes in them."""

from __future__ import annotations

import errno
import fcntl
from pathlib import Path

import pytest

from rlcore.models.unfinished import abandoned, remove_abandoned, unfinished_folder


def test_a_folder_is_its_writers_until_the_block_ends(tmp_path: Path) -> None:
    with unfinished_folder(tmp_path / "new", ".tmp-") as folder:
        assert folder.parent == tmp_path / "new"
        assert list(abandoned(folder.parent, ".tmp-")) == []
        remove_abandoned(folder.parent, ".tmp-")
        assert folder.is_dir()
    assert not folder.exists()


def test_a_renamed_folder_stays(tmp_path: Path) -> None:
    with unfinished_folder(tmp_path, ".tmp-") as folder:
        folder.rename(tmp_path / "made")
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_folders_without_a_writer_are_removed_and_nothing_else(tmp_path: Path) -> None:
    theirs = (".tmp-other-0123abcd", ".tmp-out-mine", "out")
    for name in (".tmp-out-", ".tmp-out-0123abcd", ".tmp-out-4567cdef", *theirs):
        (tmp_path / name).mkdir()
    (tmp_path / ".tmp-out-00000000").touch()
    (tmp_path / ".tmp-out-11111111").symlink_to(tmp_path / "out")
    remove_abandoned(tmp_path, ".tmp-out-")
    left = {*theirs, ".tmp-out-00000000", ".tmp-out-11111111"}
    assert {path.name for path in tmp_path.iterdir()} == left
    remove_abandoned(tmp_path / "nowhere", ".tmp-")


def test_on_a_disk_without_locks_a_folder_can_be_written_and_counts_as_somebodys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EBADF, "Bad file descriptor")

    monkeypatch.setattr(fcntl, "flock", refuse)
    (tmp_path / ".tmp-0123abcd").mkdir()
    with unfinished_folder(tmp_path, ".tmp-") as folder:
        remove_abandoned(tmp_path, ".tmp-")
        assert {path.name for path in tmp_path.iterdir()} == {".tmp-0123abcd", folder.name}

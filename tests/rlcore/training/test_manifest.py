"""Sealed files: those of a folder, and one that only grows. What was sealed is found again, and nothing else is."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from rlcore.errors import CheckpointError, StorageError
from rlcore.training.manifest import AppendOnlyFile, has_sealed_prefix, matches_manifest, write_manifest


def written(path: Path, *lines: str) -> AppendOnlyFile:
    """A file with these lines, which are on the disk."""
    file = AppendOnlyFile(path)
    for line in lines:
        file.add(line)
    file.seal()
    return file


def test_what_was_sealed_is_found_again_however_far_the_file_has_grown(tmp_path: Path) -> None:
    path = tmp_path / "new" / "lines"
    file = written(path, "a", "b")
    seal = file.seal()
    file.add("c")
    longer = file.seal()
    assert path.read_text() == "a\nb\nc\n"
    assert has_sealed_prefix(path, seal) and has_sealed_prefix(path, longer)
    assert AppendOnlyFile(path).restore(seal) == ["a", "b"]


def test_what_stands_behind_the_seal_is_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    seal = written(path, "a").seal()
    written(path, "a", "lost", "lost")
    again = AppendOnlyFile(path)
    again.restore(seal)
    again.add("b")
    again.seal()
    assert path.read_text() == "a\nb\n"


def test_a_run_without_a_seal_begins_the_file_anew(tmp_path: Path) -> None:
    written(tmp_path / "lines", "of", "a", "run", "without", "checkpoint")
    again = AppendOnlyFile(tmp_path / "lines")
    assert again.restore(None) == []
    again.add("b")
    again.seal()
    assert (tmp_path / "lines").read_text() == "b\n"


@pytest.mark.parametrize("content", ["x\nb\n", "a\n", ""])
def test_a_file_that_has_changed_or_is_cut_is_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "lines"
    seal = written(path, "a", "b").seal()
    path.write_text(content)
    assert not has_sealed_prefix(path, seal)
    with pytest.raises(CheckpointError, match="differs from the seal of the newest checkpoint"):
        AppendOnlyFile(path).restore(seal)


def test_lines_wait_while_the_disk_is_full(tmp_path: Path) -> None:
    file = written(tmp_path / "lines", "a")
    file.add("b" * 2000)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(StorageError, match="could not be written"):
            file.seal()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    file.seal()
    assert (tmp_path / "lines").read_text() == "a\n" + "b" * 2000 + "\n"


def test_a_folder_is_as_stated_until_a_file_changes_or_comes_or_goes(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1")
    write_manifest(tmp_path)
    assert matches_manifest(tmp_path, at_least={"a"})
    assert not matches_manifest(tmp_path, at_least={"a", "b"})
    (tmp_path / "a").write_text("2")
    assert not matches_manifest(tmp_path, at_least={"a"})
    (tmp_path / "a").write_text("1")
    (tmp_path / "b").write_text("")
    assert not matches_manifest(tmp_path, at_least={"a"})

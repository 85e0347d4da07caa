"""The manifest of a folder; tests/rlcore/training/test_checkpoint.py damages whole checkpoints."""

from __future__ import annotations

from pathlib import Path

from rlcore.training.manifest import is_as_stated, write_manifest


def test_a_folder_is_as_stated_until_a_file_changes_or_comes_or_goes(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1")
    write_manifest(tmp_path)
    assert is_as_stated(tmp_path, at_least={"a"})
    assert not is_as_stated(tmp_path, at_least={"a", "b"})
    (tmp_path / "a").write_text("2")
    assert not is_as_stated(tmp_path, at_least={"a"})
    (tmp_path / "a").write_text("1")
    (tmp_path / "b").write_text("")
    assert not is_as_stated(tmp_path, at_least={"a"})

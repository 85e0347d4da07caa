"""The files of a box: made once, checked at each use, nobody else's."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from rlcore.errors import SandboxError
from rlcore.sandbox.image import box_image


def test_an_image_is_used_again_while_it_is_whole_and_made_again_when_a_file_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # other tests run in the usual one
    folder = box_image()
    made = (folder / "image.json").stat().st_mtime_ns
    assert (box_image(), (folder / "image.json").stat().st_mtime_ns) == (folder, made)
    next((folder / "root").rglob("this.py")).unlink()
    assert box_image() == folder
    assert (folder / "image.json").stat().st_mtime_ns > made
    assert list((folder / "root").rglob("this.py"))


def test_an_image_has_no_shell_no_package_and_no_configuration() -> None:
    root = box_image() / "root"
    names = {path.name for path in root.rglob("*")}
    assert names.isdisjoint({"sh", "bash", "etc", "proc", "site-packages", "passwd", "test", "idlelib"})
    assert {path.name for path in root.iterdir()} <= {"python", "lib", "lib64", "dev"}


def test_every_user_may_read_an_image_and_nobody_else_may_write() -> None:
    for path in (box_image() / "root").rglob("*"):
        if not path.is_symlink():
            assert path.stat().st_mode & 0o022 == 0
            assert path.stat().st_mode & 0o004


def test_a_folder_that_others_may_write_to_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    name = box_image().name
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / name).mkdir()
    (tmp_path / name).chmod(0o777)
    with pytest.raises(SandboxError, match=r"(?s)others may write.*TMPDIR"):
        box_image()

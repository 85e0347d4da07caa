"""The files of a box: made once, checked at each use, nobody else's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlcore.errors import SandboxError
from rlcore.sandbox.image import box_image


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A cache without an image: other tests run in the usual one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "rlcore-boxes"


def test_an_image_is_used_again_while_it_is_whole(cache: Path) -> None:
    image = box_image()
    made = image.stat().st_ctime_ns
    assert (box_image(), image.stat().st_ctime_ns, image.parent) == (image, made, cache)
    assert sorted(path.name for path in cache.iterdir()) == sorted(
        ["lock", image.name, *(path.name for path in cache.glob("*.json"))]
    )


def test_an_image_that_lost_a_file_is_made_anew_beside_it_and_boxes_that_run_keep_theirs(cache: Path) -> None:
    first = box_image()
    next((first / "root").rglob("this.py")).unlink()
    (cache / ".new-killed").mkdir()  # what a process that was killed has left
    (cache / ".new-killed.json").touch()
    (first / "root" / "mark").touch()  # the old folder is still the one that boxes have mounted
    second = box_image()
    assert second != first
    assert list((second / "root").rglob("this.py"))
    assert (first / "root" / "mark").exists()
    assert second.name.rpartition("-")[0] == first.name.rpartition("-")[0]  # named by the same content
    assert box_image() == second
    assert list(cache.glob(".new-*")) == []


MANY = """
import sys
from rlcore.sandbox.image import box_image
sys.stdin.readline()
print(box_image())
"""


def test_of_many_processes_that_start_at_once_one_makes_the_image(cache: Path) -> None:
    pipe = subprocess.PIPE
    starting = [subprocess.Popen([sys.executable, "-c", MANY], stdin=pipe, stdout=pipe, text=True) for _ in range(4)]
    for process in starting:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    found = {process.communicate()[0].strip() for process in starting}
    assert [process.returncode for process in starting] == [0] * 4
    assert found == {str(box_image())}
    assert len([path for path in cache.iterdir() if path.is_dir()]) == 1


def test_the_folder_is_for_this_user_alone(cache: Path) -> None:
    box_image()
    assert cache.stat().st_mode & 0o777 == (0o711 if os.geteuid() == 0 else 0o700)


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


def test_a_folder_that_others_may_write_to_is_refused(cache: Path) -> None:
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    with pytest.raises(SandboxError, match=r"(?s)other users may write.*XDG_CACHE_HOME"):
        box_image()


def test_a_link_in_place_of_the_folder_is_refused(cache: Path, tmp_path: Path) -> None:
    cache.parent.mkdir()
    (tmp_path / "elsewhere").mkdir()
    cache.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SandboxError, match="belongs to another user"):
        box_image()


def test_a_cache_that_cannot_be_written_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(SandboxError, match=r"(?s)cannot be written.*XDG_CACHE_HOME"):
        box_image()

"""Temporary folders of commands: gone when they end, and after a kill with the next command."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rlcore.tasks.store.scratch import announced, remove_left, scratch_folder
from rlcore.tasks.store.settings import Home, configure_environment

KILLED = """
import os, signal, sys
from pathlib import Path
from rlcore.models.unfinished import unfinished_folder
from rlcore.tasks.store.scratch import announced, scratch_folder
work, place = map(Path, sys.argv[1:])
with scratch_folder(work) as folder, announced(work, place, ".tmp-out-"):
    (folder / "weights").touch()
    with unfinished_folder(place, ".tmp-out-") as begun:
        (begun / "half").touch()
        os.kill(os.getpid(), signal.SIGKILL)
"""


def kill_one(work: Path, place: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(work), str(place)], check=False)
    assert done.returncode == -signal.SIGKILL


def test_what_a_killed_command_has_left_in_the_home_and_elsewhere_goes_with_the_next(
    home: Home, tmp_path: Path
) -> None:
    place = tmp_path / "a [place] of mine"
    place.mkdir()
    (place / ".tmp-out-but-a-file").touch()
    kill_one(home.work, place)
    assert len([*home.work.iterdir()]) == 2
    assert len([*place.iterdir()]) == 2
    configure_environment(home)
    assert [*home.work.iterdir()] == []
    assert [path.name for path in place.iterdir()] == [".tmp-out-but-a-file"]


def test_what_a_living_command_works_in_stays_and_is_gone_when_it_ends(home: Home, tmp_path: Path) -> None:
    with scratch_folder(home.work) as folder, announced(home.work, tmp_path, ".tmp-x-"):
        (tmp_path / ".tmp-x-0123abcd").mkdir()
        remove_left(home.work)
        assert folder.is_dir()
        assert (tmp_path / ".tmp-x-0123abcd").is_dir()
    assert [*home.work.iterdir()] == []


def test_a_folder_of_a_living_process_stays_though_a_dead_one_announced_the_same(home: Home, tmp_path: Path) -> None:
    from rlcore.models.unfinished import unfinished_folder

    kill_one(home.work, tmp_path)
    with unfinished_folder(tmp_path, ".tmp-out-") as living:
        remove_left(home.work)
        assert [path for path in tmp_path.iterdir() if path.name.startswith(".tmp-")] == [living]


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_what_may_not_be_removed_stops_no_command(home: Home, tmp_path: Path) -> None:
    kill_one(home.work, tmp_path)
    tmp_path.chmod(0o500)
    remove_left(home.work)
    tmp_path.chmod(0o700)

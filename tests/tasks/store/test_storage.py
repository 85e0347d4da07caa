"""Files: atomic writes, locks, and temporary folders."""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest

from rlcore.errors import StorageError
from rlcore.tasks.store import storage
from rlcore.tasks.store.locks import announced, file_lock, is_held, locked_file, remove_left, scratch_folder
from rlcore.tasks.store.settings import Home, configure_environment
from rlcore.tasks.store.storage import (
    read_column,
    read_json,
    read_table,
    table_writer,
    write_bytes,
    write_json,
    write_table,
)

TURNS = [{"role": "user", "content": "3 + 4"}, {"role": "assistant", "content": "7 ✓"}]


@contextmanager
def as_nobody() -> Iterator[None]:
    """Root may do anything: be another user for a moment."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


@contextmanager
def disk_of(num_bytes: int) -> Iterator[None]:
    """No file may grow beyond ``num_bytes``: the write stops in the middle, as on a full disk."""
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_table_comes_back_with_its_types_and_plain_lists(tmp_path: Path) -> None:
    frame = pd.DataFrame(
        {
            "name": ["a", ""],
            "messages": [TURNS, TURNS[:1]],
            "ids": [[1, 2], []],
            "logprobs": [[-0.5], [0.0, -1.0]],
            "mask": [[True], [False]],
            "value": [1.0, math.nan],
            "count": [1, 2],
            "correct": [True, False],
        }
    )
    write_table(frame, tmp_path / "new" / "table.parquet")
    back = read_table(tmp_path / "new" / "table.parquet")
    pd.testing.assert_frame_equal(back, frame)
    assert back["messages"][0] == TURNS
    assert type(back["ids"][0]) is list
    assert type(back["mask"][0][0]) is bool


def test_a_table_in_parts_is_the_whole_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    frame = pd.DataFrame({"name": [str(number) for number in range(50)], "messages": [TURNS] * 50, "value": 0.5})
    write_table(frame, tmp_path / "whole.parquet")
    with table_writer(tmp_path / "parts.parquet") as add:
        for start in range(0, 50, 7):
            add(frame.iloc[start : start + 7])
    assert (tmp_path / "parts.parquet").read_bytes() == (tmp_path / "whole.parquet").read_bytes()
    monkeypatch.setattr(storage, "GROUP_ROWS", 10)
    with table_writer(tmp_path / "groups.parquet") as add:
        for start in range(0, 50, 7):
            add(frame.iloc[start : start + 7])
    assert pq.ParquetFile(tmp_path / "groups.parquet").num_row_groups == 4
    pd.testing.assert_frame_equal(read_table(tmp_path / "groups.parquet"), frame)
    assert [one for some in read_column(tmp_path / "groups.parquet", "messages") for one in some] == [TURNS] * 50


def test_a_table_in_parts_that_is_given_up_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "table.parquet"
    path.write_bytes(b"old")
    with pytest.raises(RuntimeError), table_writer(path) as add:
        add(pd.DataFrame({"a": [1]}))
        raise RuntimeError
    assert [entry.name for entry in tmp_path.iterdir()] == ["table.parquet"]
    assert path.read_bytes() == b"old"
    with pytest.raises(StorageError, match="cannot be stored") as caught, table_writer(path) as add:
        add(pd.DataFrame({"a": ["x", 1]}))
    assert caught.value.fix
    assert path.read_bytes() == b"old"


def test_json_comes_back_and_nan_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a" / "value.json"
    write_json({"x": [1, "ä", None, True]}, path)
    assert read_json(path) == {"x": [1, "ä", None, True]}
    assert "ä" in path.read_text(encoding="utf-8")
    with pytest.raises(StorageError, match="no JSON"):
        write_json({"x": math.nan}, path)
    assert read_json(path) == {"x": [1, "ä", None, True]}


def test_a_full_disk_leaves_the_old_file_and_no_rubbish(tmp_path: Path) -> None:
    path = tmp_path / "value.json"
    write_json({"old": 1}, path)
    with disk_of(1000), pytest.raises(StorageError, match="cannot write the file: File too large") as caught:
        write_bytes(b"x" * 5000, path)
    assert caught.value.where == str(path)
    assert json.loads(path.read_text()) == {"old": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["value.json"]


def test_a_folder_without_permission_says_what_to_do(tmp_path: Path) -> None:
    folder = tmp_path / "closed"
    folder.mkdir()
    write_json(1, folder / "value.json")
    write_table(pd.DataFrame({"a": [1]}), folder / "table.parquet")
    folder.chmod(0)
    try:
        with as_nobody():
            for act in (
                lambda: write_bytes(b"x", folder / "new"),
                lambda: read_json(folder / "value.json"),
                lambda: read_table(folder / "table.parquet"),
            ):
                with pytest.raises(StorageError, match="Permission denied") as caught:
                    act()
                assert "right to read and write" in caught.value.fix
    finally:
        folder.chmod(0o700)


@pytest.mark.parametrize("read", [read_json, read_table])
def test_a_missing_and_a_damaged_file_are_named(tmp_path: Path, read: object) -> None:
    assert callable(read)
    path = tmp_path / "file"
    with pytest.raises(StorageError, match="No such file or directory") as caught:
        read(path)
    assert caught.value.where == str(path)
    path.write_bytes(b"PAR1 and then nonsense {")
    with pytest.raises(StorageError, match="not a") as caught:
        read(path)
    assert caught.value.where == str(path)


HOLD = """
import sys, time
from pathlib import Path
from rlcore.tasks.store.locks import file_lock
with file_lock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""
FORK = """
import os, signal, sys, time
from pathlib import Path
from rlcore.tasks.store.locks import file_lock
with file_lock(Path(sys.argv[1])):
    worker = os.fork()
    if worker == 0:
        os.close(1)
        time.sleep(600)
    print(worker, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def hold_elsewhere(path: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_lock_held_elsewhere_is_refused_at_once_and_free_after_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with hold_elsewhere(path) as process:
        with file_lock(path, wait=False) as free:
            assert not free
        process.send_signal(signal.SIGKILL)
        process.wait()
        with file_lock(path, wait=False) as free:
            assert free
    assert not path.exists()


def test_whether_a_lock_is_held_can_be_asked_without_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert not is_held(path)
    with hold_elsewhere(path) as process:
        assert is_held(path)
        process.kill()
        process.wait()
        assert not is_held(path)
    assert path.exists()


def test_only_one_of_many_threads_holds_a_lock_at_a_time(tmp_path: Path) -> None:
    inside: list[int] = []
    most = 0

    def work() -> None:
        nonlocal most
        for _ in range(20):
            with file_lock(tmp_path / "lock"):
                inside.append(1)
                most = max(most, len(inside))
                time.sleep(0.0002)
                inside.pop()

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1
    assert not (tmp_path / "lock").exists()


def test_a_forked_worker_does_not_keep_the_lock_of_its_dead_parent(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    done = subprocess.run([sys.executable, "-c", FORK, str(path)], stdout=subprocess.PIPE, text=True, check=False)
    worker = int(done.stdout)
    try:
        assert done.returncode == -signal.SIGKILL
        os.kill(worker, 0)  # it lives
        with file_lock(path, wait=False) as free:
            assert free
    finally:
        os.kill(worker, signal.SIGKILL)


def test_a_locked_file_is_never_seen_unlocked_and_is_gone_afterwards(tmp_path: Path) -> None:
    path = tmp_path / "lease.json"
    with locked_file(path, "text"):
        assert path.read_text() == "text"
        with file_lock(path, wait=False) as free:
            assert not free
        assert [entry.name for entry in tmp_path.iterdir()] == ["lease.json"]
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_missing_is_an_error_with_its_place(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="nowhere"), file_lock(tmp_path / "nowhere" / "lock"):
        pass
    with pytest.raises(StorageError, match="nowhere"), locked_file(tmp_path / "nowhere" / "lease", ""):
        pass


KILLED = """
import os, signal, sys
from pathlib import Path
from rlcore.models.files import unfinished_folder
from rlcore.tasks.store.locks import announced, scratch_folder
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


def test_the_next_command_removes_what_a_killed_one_has_left(home: Home, tmp_path: Path) -> None:
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
    from rlcore.models.files import unfinished_folder

    kill_one(home.work, tmp_path)
    with unfinished_folder(tmp_path, ".tmp-out-") as living:
        remove_left(home.work)
        assert [path for path in tmp_path.iterdir() if path.name.startswith(".tmp-")] == [living]

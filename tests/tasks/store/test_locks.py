from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from rlcore.errors import StorageError
from rlcore.tasks.store.locks import file_lock, is_held, locked_file

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


def test_an_error_inside_goes_on_unchanged(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), locked_file(tmp_path / "lease.json", "text"):
        raise FileNotFoundError("of the pipeline, not of the lease")


def test_a_folder_that_is_missing_is_an_error_with_its_place(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="nowhere"), file_lock(tmp_path / "nowhere" / "lock"):
        pass
    with pytest.raises(StorageError, match="nowhere"), locked_file(tmp_path / "nowhere" / "lease", ""):
        pass

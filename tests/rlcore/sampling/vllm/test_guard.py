"""Whatever ends the process that started an engine, the engine's processes end too."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from rlcore.sampling.vllm import guard as guard_script
from tests.waiting import LONG, until, until_ended

# An "engine" with a child that has left the process group, as a daemon does; both write their numbers and wait.
ENGINE = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
with open(sys.argv[1] + ".new", "w") as file:
    file.write(f"{os.getpid()} {child.pid}")
os.rename(sys.argv[1] + ".new", sys.argv[1])
time.sleep(600)
"""
# A parent that starts the guard and waits.
PARENT = """
import os, subprocess, sys, time
subprocess.Popen([sys.executable, "-I", sys.argv[1], str(os.getpid()), *sys.argv[2:]])
time.sleep(600)
"""


def guarded(folder: Path, numbers: Path) -> list[str]:
    return [str(folder), sys.executable, "-c", ENGINE, str(numbers)]


def processes_of(numbers: Path) -> list[int]:
    until(numbers.exists, "the engine")
    return [int(number) for number in numbers.read_text().split()]


def start_guard(folder: Path, numbers: Path) -> subprocess.Popen[bytes]:
    guard = [sys.executable, "-I", guard_script.__file__, str(os.getpid())]
    return subprocess.Popen([*guard, *guarded(folder, numbers)])


@pytest.mark.parametrize("last", [signal.SIGKILL, signal.SIGTERM])
def test_the_engine_and_its_folders_go_with_a_parent_that_is_killed(tmp_path: Path, last: signal.Signals) -> None:
    folder, numbers = tmp_path / "weights", tmp_path / "numbers"
    folder.mkdir()
    parent = subprocess.Popen([sys.executable, "-c", PARENT, guard_script.__file__, *guarded(folder, numbers)])
    processes = processes_of(numbers)
    parent.send_signal(last)
    parent.wait()
    until_ended(processes)
    until(lambda: not folder.exists(), "the end of the weight files")


def test_the_engine_goes_when_the_guard_is_asked_and_the_folder_stays_for_the_parent(tmp_path: Path) -> None:
    folder, numbers = tmp_path / "log", tmp_path / "numbers"
    folder.mkdir()
    guard = start_guard(folder, numbers)
    processes = processes_of(numbers)
    guard.terminate()
    assert guard.wait(LONG) == 143
    until_ended(processes)
    assert folder.exists()


def test_memory_that_a_killed_engine_shared_is_freed(tmp_path: Path) -> None:
    """Two processes map it, the first is killed; Python's own tracker of such memory is told to forget it."""
    engine = """
import subprocess, sys, time
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
memory = SharedMemory(name=sys.argv[2] if len(sys.argv) > 2 else None, create=len(sys.argv) < 3, size=4096)
resource_tracker.unregister(memory._name, "shared_memory")
if len(sys.argv) < 3:
    subprocess.Popen([sys.executable, "-c", sys.argv[1], sys.argv[1], memory.name])
else:
    print(memory.name, flush=True)
time.sleep(600)
"""
    guard = [sys.executable, "-I", guard_script.__file__, str(os.getpid()), str(tmp_path)]
    with subprocess.Popen([*guard, sys.executable, "-c", engine, engine], stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        path = Path("/dev/shm", running.stdout.readline().strip())
        assert path.name.startswith("psm_")
        assert path.exists()
        (first,) = psutil.Process(running.pid).children()
        first.kill()
        running.wait(LONG)
    assert not path.exists()


def test_what_an_engine_leaves_behind_goes_with_it(tmp_path: Path) -> None:
    guard = start_guard(tmp_path, tmp_path / "numbers")
    engine, child = processes_of(tmp_path / "numbers")
    os.kill(engine, signal.SIGKILL)
    assert guard.wait(LONG) == -signal.SIGKILL % 256
    until_ended([child])

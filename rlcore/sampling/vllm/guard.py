"""Guard: stop an engine's processes when the process that started them ends in any way.

    python guard.py PARENT_PID FOLDERS COMMAND...

The guard is the engine's parent. It stops the engine on SIGTERM, and when its own parent is gone, whose pid it checks
ten times a second. When the engine's first process ends, it stops the others. It removes the engine's named shared
memory (hundreds of megabytes) and, if the parent is gone, FOLDERS (joined as in PATH). It imports only the standard
library, to start quickly.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

GRACE_SECONDS = 10.0  # between SIGTERM and SIGKILL
_POLL_SECONDS = 0.1
_SCAN_SECONDS = 5.0  # between two scans for shared memory of the engine
_SHARED = re.compile(r"/dev/shm/(?:psm_|sem\.mp-)\w+")  # names of Python's multiprocessing
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def main(arguments: Sequence[str]) -> int:
    """Run COMMAND until it ends or must end. Return its exit status, or 143 after SIGTERM or the parent's death."""
    parent, folders, command = int(arguments[0]), arguments[1].split(os.pathsep), arguments[2:]
    signals: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        signals.append(number)

    signal.signal(signal.SIGTERM, note)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C also reaches the parent, which stops the engine cleanly
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # the engine's orphans become children of the guard, not of init
    engine = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_die_with_guard)
    shared: set[str] = set()
    looked = time.monotonic()
    while engine.poll() is None and not signals and os.getppid() == parent:
        time.sleep(_POLL_SECONDS)
        if time.monotonic() - looked > _SCAN_SECONDS:
            shared, looked = shared | shared_memory(), time.monotonic()
    shared |= shared_memory()
    end_all(engine)
    for path in shared:
        Path(path).unlink(missing_ok=True)
    if os.getppid() == parent:
        return 143 if signals else engine.returncode
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    return 143


def end_all(engine: subprocess.Popen[bytes]) -> None:
    """Send SIGTERM, then SIGKILL, to all descendants, also those that left the engine's group."""
    _signal_all(signal.SIGTERM)
    deadline = time.monotonic() + GRACE_SECONDS
    while descendants(os.getpid()):
        if time.monotonic() > deadline:
            _signal_all(signal.SIGKILL)
        engine.poll()
        _reap(engine.pid)
        time.sleep(0.1)
    engine.wait()


def descendants(root: int) -> list[int]:
    """Return the pids of all descendants of ``root``, as /proc lists them."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError):
                # "pid (name) state ppid …": the name may hold spaces and brackets
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found: list[int] = []
    level = [root]
    while level:
        level = [child for number in level for child in children.get(number, [])]
        found += level
    return found


def shared_memory() -> set[str]:
    """Return the paths of named multiprocessing shared memory that descendants of this process have mapped."""
    found: set[str] = set()
    for process in descendants(os.getpid()):
        with contextlib.suppress(OSError):  # it has ended
            found |= set(_SHARED.findall(Path(f"/proc/{process}/maps").read_text()))
    return found


def _signal_all(number: signal.Signals) -> None:
    for process in descendants(os.getpid()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)


def _reap(engine: int) -> None:
    """Reap adopted processes that have ended; Popen reaps the engine."""
    for number in descendants(os.getpid()):
        if number != engine:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(number, os.WNOHANG)


def _die_with_guard() -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Supervisor: a small process that starts boxes for one program at a time and cleans up after each.

Run as ``python -m rlcore.sandbox.supervisor CONNECTION_FD BWRAP IMAGE``. It is small because forking a large parent
takes 100 ms, and separate because it reaps what a box leaves behind. As root it switches to an unused uid, so boxes and
supervisors have no rights on other processes. When the caller ends, the connection closes, and its boxes die with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import sys
import threading
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rlcore.sandbox.base import ResourceLimits, RunResult
from rlcore.sandbox.isolation import Isolation, runner_code
from rlcore.sandbox.program_check import check_program, run_program
from rlcore.sandbox.suite import parse_suite

MAX_MESSAGE_BYTES = 64 << 20
_PR_SET_CHILD_SUBREAPER = 36
_FIRST_UID, _NARROW_UID, _NARROW_COUNT = 1_000_000, 20_000, 40_000
_LARGEST_PID = 1 << 22


def main(arguments: list[str]) -> None:
    """Serve requests until the connection closes."""
    connection = Connection(int(arguments[0]))
    isolation = Isolation(bwrap=arguments[1], image=arguments[2])
    sys.set_int_max_str_digits(0)  # tests may contain long integers
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # it reaps the orphans below
    threading.Thread(target=_end_with, args=(connection.fileno(),), daemon=True).start()
    runner_code()
    if os.geteuid() == 0 and isolation.bwrap:
        _drop_privileges()
    with contextlib.suppress(EOFError, ConnectionResetError, BrokenPipeError):
        while True:
            request = json.loads(connection.recv_bytes(MAX_MESSAGE_BYTES))
            outcomes = _handle(request, isolation)
            _reap()
            connection.send_bytes(json.dumps([_to_json(one) for one in outcomes]).encode())


def _end_with(descriptor: int) -> None:
    """Kill this process, and thereby its boxes, when the other end of the connection closes."""
    poll = select.poll()
    poll.register(descriptor, select.POLLRDHUP)
    poll.poll()
    os.kill(os.getpid(), signal.SIGKILL)


def _handle(request: Mapping[str, Any], isolation: Isolation) -> list[RunResult]:
    limits = ResourceLimits(**request["limits"])
    if "reference" not in request:
        return [run_program(isolation, request["code"], request["stdin"], limits)]
    suite = parse_suite(request["reference"])
    return check_program(isolation, suite, request["code"], limits, stop_early=request["stop_early"])


def _to_json(outcome: RunResult) -> dict[str, str]:
    """Return a result as JSON. Half of a surrogate pair becomes its escape, because files cannot hold it."""
    texts = {"stdout": outcome.stdout, "error": outcome.error}
    plain = {name: text.encode("utf-8", "backslashreplace").decode() for name, text in texts.items()}
    return {"status": outcome.status.value, **plain}


def _drop_privileges() -> None:
    """Switch to a uid per supervisor: process limits count per user, so boxes with one uid would affect each other."""
    uid = _FIRST_UID + os.getpid()
    if not _is_mapped(_FIRST_UID + _LARGEST_PID):  # a container with 65,536 users
        uid = _NARROW_UID + os.getpid() % _NARROW_COUNT
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def _is_mapped(uid: int) -> bool:
    ranges = [line.split() for line in Path("/proc/self/uid_map").read_text().splitlines()]
    return any(int(first) <= uid < int(first) + int(count) for first, _, count in ranges)


def _reap() -> None:
    """Reap orphans of boxes. Processes that this supervisor started itself were waited for already."""
    with contextlib.suppress(ChildProcessError):
        while os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG) is not None:
            pass


if __name__ == "__main__":
    main(sys.argv[1:])

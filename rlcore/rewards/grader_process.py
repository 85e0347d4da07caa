"""Grader process: import a grader once, then fork workers that the caller can kill at any time.

Run as ``python -m rlcore.rewards.grader_process CONTROL_FD GRADER MEMORY_BYTES SECONDS``. Over the control socket the
caller sends ``fork`` (with the worker's end of a connection), answered by the pid, or ``kill PID``, answered by the
signal that ended it. When the caller ends, the socket closes and every worker is killed.

Forking takes milliseconds, a fresh start seconds, and a parent that reaps its children kills no recycled pid. A request
has SECONDS of CPU time; then the kernel ends its worker by SIGPROF, even in C code. Thus a busy machine changes no
score.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import re
import resource
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

from rlcore.choices import choices

MAX_MESSAGE_BYTES = 1 << 20
READY = b"ready"

Grade = Callable[[dict[str, Any]], Any]

# Imported only in this process: reasoning_gym takes seconds to import, and graders may hang.
GRADERS: Mapping[str, Callable[[], Grade]] = choices(
    "rewards.kind",
    {
        "math": lambda: _warmed_up(importlib.import_module("rlcore.rewards.math_verifier")),
        "procedural": lambda: _warmed_up(importlib.import_module("rlcore.rewards.procedural_scorer")),
        "format": lambda: _matches,
    },
)


def _warmed_up(module: Any) -> Grade:
    module.warm_up()  # so that forked workers start warm
    grade: Grade = module.grade
    return grade


def _matches(request: dict[str, Any]) -> bool:
    """Return True if the whole stripped ``text`` matches a user's ``pattern``, which may backtrack exponentially."""
    return re.fullmatch(request["pattern"], request["text"].strip()) is not None


def main(arguments: list[str]) -> None:
    """Load the grader, report success or the error, and serve until the control socket closes."""
    control = socket.socket(fileno=int(arguments[0]))
    memory_bytes, seconds = int(arguments[2]), float(arguments[3])
    try:
        grade = GRADERS[arguments[1]]()
    except Exception as error:  # noqa: BLE001 - reported to the caller
        control.sendall(f"{type(error).__name__}: {error}".encode()[:500])
        return
    gc.freeze()  # the workers share the loaded modules' memory
    control.sendall(READY)
    children: set[int] = set()
    try:
        while True:
            message, descriptors, *_ = socket.recv_fds(control, 64, 1)
            if not message:
                return  # the caller has ended
            if descriptors:
                reply = _fork_worker(control, descriptors[0], grade, memory_bytes, seconds)
                children.add(reply)
            else:
                pid = int(message.decode().removeprefix("kill "))
                children.discard(pid)
                reply = _kill(pid)
            control.sendall(str(reply).encode())
    finally:
        for pid in children:
            _kill(pid)


def _fork_worker(control: socket.socket, descriptor: int, grade: Grade, memory_bytes: int, seconds: float) -> int:
    pid = os.fork()
    if pid:
        os.close(descriptor)
        return pid
    try:
        control.close()
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(signal.SIGPROF, signal.SIG_DFL)  # the parent may have ignored it
        _serve(Connection(descriptor), grade, seconds)
    finally:
        os._exit(0)


def _serve(connection: Connection, grade: Grade, seconds: float) -> None:
    while True:
        try:
            request = json.loads(connection.recv_bytes(MAX_MESSAGE_BYTES).decode("utf-8", "surrogatepass"))
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_PROF, seconds)
        reply = _reply(grade, request)
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        connection.send_bytes(json.dumps(reply).encode())


def _reply(grade: Grade, request: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"value": grade(request)}
    except (MemoryError, RecursionError) as error:
        return {"error": f"{type(error).__name__}: {error}"[:500], "is_of_answer": True}
    except Exception as error:  # noqa: BLE001 - returned as an error that the caller counts
        return {"error": f"{type(error).__name__}: {error}"[:500]}


def _kill(pid: int) -> int:
    os.kill(pid, signal.SIGKILL)  # an unreaped child keeps its pid, so no other process is killed
    return os.WTERMSIG(os.waitpid(pid, 0)[1])


if __name__ == "__main__":
    main(sys.argv[1:])

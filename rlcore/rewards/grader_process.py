"""The process that grades: imports a grader once, then forks workers that the caller may have killed at any moment.

Run as ``python -m rlcore.rewards.grader_process CONTROL_FD GRADER MEMORY_BYTES SECONDS``. A grader is a module
with ``warm_up() -> None`` and ``grade(request: dict) -> JSON value``. Over the control socket the caller sends ``fork``
(with the worker's end of a connection), which is answered by the pid, or ``kill PID``, by the signal that ended it.
Forking costs milliseconds where a fresh start costs seconds, and a parent that reaps its own children can never kill a
recycled pid. When the caller ends, however it ends, the control socket closes and every worker is killed.

A request has SECONDS of processor time, then the kernel ends its worker by SIGPROF, in the middle of C code too: a busy
machine costs no answer its grade.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any

from rlcore.choices import choices

MAX_MESSAGE_BYTES = 1 << 20
READY = b"ready"

Grade = Callable[[dict[str, Any]], Any]

# Loaded in this process alone: reasoning_gym takes seconds, and graders are what may hang.
GRADERS: Mapping[str, Callable[[], ModuleType]] = choices(
    "rewards.kind",
    {
        "math": lambda: importlib.import_module("rlcore.rewards.math_verifier"),
        "procedural": lambda: importlib.import_module("rlcore.rewards.procedural_scorer"),
        "format": lambda: importlib.import_module("rlcore.rewards.regex_matcher"),
    },
)


def main(arguments: list[str]) -> None:
    """Load the grader, say so (or why not), and serve until the control socket closes."""
    control = socket.socket(fileno=int(arguments[0]))
    memory_bytes, seconds = int(arguments[2]), float(arguments[3])
    try:
        module = GRADERS[arguments[1]]()
        module.warm_up()
    except Exception as error:  # noqa: BLE001 - whatever the reason, the caller has to be told
        control.sendall(f"{type(error).__name__}: {error}".encode()[:500])
        return
    gc.freeze()  # the workers share the loaded modules' memory
    control.sendall(READY)
    children: set[int] = set()
    try:
        while command := _receive(control):
            if command.descriptor is None:
                children.discard(command.pid)
                said = _kill(command.pid)
            else:
                said = _fork_worker(control, command.descriptor, module.grade, memory_bytes, seconds)
                children.add(said)
            control.sendall(str(said).encode())
    finally:
        for pid in children:
            _kill(pid)


@dataclass(frozen=True, slots=True)
class _Command:
    """``kill PID``, or ``fork`` with the worker's end of a connection."""

    pid: int
    descriptor: int | None


def _receive(control: socket.socket) -> _Command | None:
    message, descriptors, *_ = socket.recv_fds(control, 64, 1)
    if not message:
        return None  # the caller has ended
    pid = 0 if descriptors else int(message.decode().removeprefix("kill "))
    return _Command(pid, descriptors[0] if descriptors else None)


def _fork_worker(control: socket.socket, descriptor: int, grade: Grade, memory_bytes: int, seconds: float) -> int:
    pid = os.fork()
    if pid:
        os.close(descriptor)
        return pid
    try:
        control.close()
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(signal.SIGPROF, signal.SIG_DFL)  # not ignored, as it may be where we were started
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
    except Exception as error:  # noqa: BLE001 - becomes an error value that the caller counts
        return {"error": f"{type(error).__name__}: {error}"[:500]}


def _kill(pid: int) -> int:
    """The number of the signal that ended it; SIGKILL where it was still alive, 0 where it left by itself."""
    os.kill(pid, signal.SIGKILL)  # an unreaped child keeps its pid, so this cannot hit a stranger
    return os.WTERMSIG(os.waitpid(pid, 0)[1])


if __name__ == "__main__":
    main(sys.argv[1:])

"""Warden: the parent process of one agent, which ends everything that the agent started.

Run as a script, ``python warden.py BRIDGE COMMAND…``, in the agent's folder and environment; it imports nothing of
rlcore. It adopts orphans below it (PR_SET_CHILD_SUBREAPER), so daemons stay within reach. It ends when the agent ends,
or when its standard input closes, which happens also if the run is killed: then it kills all processes below it, and
writes one line of JSON: exit code, last output, error. Only a process that another service starts (cron, a container
engine), or an agent that first kills its warden, escapes.

``BRIDGE`` is ``PORT:PATH`` in a sandbox without network: connections to the port of 127.0.0.1 are forwarded to the
Unix socket. Else it is empty.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import socket

KEPT_BYTES = 16 << 10  # of the output: its end
_PIECE = 1 << 16
_PR_SET_CHILD_SUBREAPER = 36
_KILL_SECONDS = 10.0  # of processes that fork faster than they are killed
_STDIN, _STDOUT, _STDERR = 0, 1, 2


def main(bridge: str, command: list[str]) -> None:
    """Run a command until it ends or standard input closes, then kill what is left, and report."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if bridge:
        _open_bridge(bridge)
    output, far_end = os.pipe()
    try:
        agent = _start(command, far_end)
    except OSError as error:
        _report(None, b"", f"the command cannot be started: {error.strerror}: {command[0]}")
        return
    os.close(far_end)
    tail = _watch(output, agent)
    code = _exit_code(agent)
    left = _kill_all()
    _report(code, tail + _drained(output), f"{left} of its processes cannot be ended" if left else "")


def forward(listener: socket.socket, connect: Callable[[], socket.socket]) -> None:
    """Forward each connection of a listener to a new one of ``connect``, in threads, until the listener is closed."""
    import threading

    def serve() -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                near, _ = listener.accept()
                threading.Thread(target=_relay, args=(near, connect), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()


def _start(command: list[str], output: int) -> int:
    """Start the agent in a session of its own, without input; return its pid."""
    actions = [
        (os.POSIX_SPAWN_OPEN, _STDIN, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_DUP2, output, _STDOUT),
        (os.POSIX_SPAWN_DUP2, output, _STDERR),
    ]
    return os.posix_spawnp(command[0], command, os.environ, file_actions=actions, setsid=True)


def _watch(output: int, agent: int) -> bytes:
    """Read the output until the agent ends or standard input closes; return the end of the output."""
    handle, tail = os.pidfd_open(agent), b""
    poll = select.poll()
    for descriptor in (_STDIN, output, handle):
        poll.register(descriptor, select.POLLIN)
    while True:
        ready = {descriptor for descriptor, _ in poll.poll()}
        if output in ready:
            piece = os.read(output, _PIECE)
            tail = (tail + piece)[-KEPT_BYTES:]
            if not piece:
                poll.unregister(output)
        if ready & {_STDIN, handle}:
            os.close(handle)
            return tail


def _exit_code(agent: int) -> int | None:
    """Return the exit code of the agent, negative for a signal; None if it runs."""
    pid, status = os.waitpid(agent, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if pid else None


def _kill_all() -> int:
    """Kill and reap all processes below this one; return the number of those that are left."""
    deadline = time.monotonic() + _KILL_SECONDS
    while _has_children():
        found = list(_descendants(os.getpid()))
        if time.monotonic() > deadline:
            return len(found)
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.001)
    return 0


def _has_children() -> bool:
    """Reap the children that have ended; return True if there are others."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def _descendants(ancestor: int) -> Iterator[int]:
    """Yield the processes below one, from the table of all processes."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):  # noqa: PTH208 - pathlib would double the time of a start
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:  # noqa: PTH123
            parent = int(file.read().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(name))
    waiting = [ancestor]
    while waiting:
        below = children.get(waiting.pop(), [])
        yield from below
        waiting += below


def _drained(output: int) -> bytes:
    """Return what is left in a pipe."""
    poll, tail = select.poll(), b""
    poll.register(output, select.POLLIN)
    while poll.poll(0) and (piece := os.read(output, _PIECE)):
        tail = (tail + piece)[-KEPT_BYTES:]
    return tail


def _report(code: int | None, output: bytes, error: str) -> None:
    text = output[-KEPT_BYTES:].decode("utf-8", "replace")
    with contextlib.suppress(BrokenPipeError):  # the run was killed
        os.write(_STDOUT, json.dumps({"code": code, "output": text, "error": error}).encode())


def _open_bridge(bridge: str) -> None:
    import socket

    port, _, path = bridge.partition(":")

    def connect() -> socket.socket:
        far = socket.socket(socket.AF_UNIX)
        far.connect(path)
        return far

    forward(socket.create_server(("127.0.0.1", int(port))), connect)


def _relay(near: socket.socket, connect: Callable[[], socket.socket]) -> None:
    """Copy the bytes of both directions until both ends are closed."""
    import socket

    with near, contextlib.suppress(OSError), connect() as far:
        others, poll = {near.fileno(): (near, far), far.fileno(): (far, near)}, select.poll()
        for descriptor in others:
            poll.register(descriptor, select.POLLIN)
        while others:
            for descriptor, _ in poll.poll():
                source, target = others[descriptor]
                if data := source.recv(_PIECE):
                    target.sendall(data)
                else:
                    target.shutdown(socket.SHUT_WR)
                    poll.unregister(descriptor)
                    del others[descriptor]


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])

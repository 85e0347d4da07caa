"""Warden: the parent process of one agent, which ends everything that the agent started.

Run as a script, ``python warden.py PLACE COMMAND…``, in the agent's folder and environment; it imports nothing of
rlcore. Standard input is a socket to the run: when it closes, as also happens if the run is killed, the warden ends.
All that it reports is its exit code, the agent's or 128 + its signal, so an agent that attacks it forges no more.

``PLACE`` is ``box`` in a sandbox. There it is process 1: no signal from inside reaches it, and the kernel ends all
other processes with it. It copies the agent's files, sets limits, and forwards connections to a port of the sandbox's
own 127.0.0.1 to the gateway's socket. Else (``plain``) it adopts orphans (PR_SET_CHILD_SUBREAPER) and kills them. Then
only a process that another service starts (cron, a container engine), or an agent that first kills its warden, escapes.
"""

from __future__ import annotations

import ctypes
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import socket

FILES, GATEWAY, PORT = "/run/files", "/run/gateway", 4711
"""Folders of a sandbox with the agent's files and with the gateway's socket, and the port that leads to it."""
SOCKET = "socket"
MAX_MEMORY = 4 << 30  # bytes: resident in all processes of a sandbox together, and data of each
MAX_PROCESSES = 512  # of a sandbox, with threads
MAX_CONNECTIONS = 64  # out of a sandbox at the same time; others wait
_LIMITS = {
    resource.RLIMIT_DATA: MAX_MEMORY,  # not RLIMIT_AS: node reserves tens of GB of addresses that it does not use
    resource.RLIMIT_NPROC: 4 * MAX_PROCESSES,  # until the warden looks; the kernel does not hold root to it
    resource.RLIMIT_NOFILE: 4096,
    resource.RLIMIT_CORE: 0,
}
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 1, 4, 36
_SIGNALS = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT, signal.SIGCHLD}
_TICK_MS, _LOOK_SECONDS = 20, 0.2  # between two looks at the number of processes, and at each of them
_MANY_NEW, _FEW = 64, 32  # processes and threads since the last look; processes that are quickly read
_KILL_SECONDS = 10.0  # of processes that fork faster than they are killed
_KILLED = 128 + signal.SIGKILL
_RUN, _ERRORS = 0, 2
_PIECE = 1 << 16


def main(place: str, command: list[str]) -> None:
    """Run a command until it ends or the run closes the socket, end its processes, and exit with its code."""
    is_boxed, prctl = place == "box", ctypes.CDLL(None).prctl
    if os.sched_getscheduler(0) == os.SCHED_FIFO:  # as the run starts it where it may: its agent does not inherit that
        os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_getparam(0))
    prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)  # agents cannot trace it, nor open its descriptors
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    serve = _bridge() if is_boxed else None
    if not is_boxed:
        prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        prctl(_PR_SET_PDEATHSIG, signal.SIGCONT, 0, 0, 0)  # the agent may have stopped it
    agent = os.fork()
    if not agent:
        _become(command, prctl, is_boxed=is_boxed)
    if serve:
        serve()
    code = _watch(agent, is_boxed=is_boxed)
    if not is_boxed and (left := _kill_all()):
        os.write(_ERRORS, f"\n{left} of the agent's processes cannot be ended\n".encode())
    os._exit(code)


def _become(command: list[str], prctl: ctypes._NamedFuncPointer, *, is_boxed: bool) -> None:
    try:
        os.setsid()
        prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)  # for the next file
        os.dup2(os.open(os.devnull, os.O_RDONLY), _RUN)
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:  # noqa: PTH123 - pathlib is slow to import
            file.write("1000")  # if memory ends, agents end before the run
        if is_boxed:
            for name, most in _LIMITS.items():
                hard = resource.getrlimit(name)[1]
                least = most if hard == resource.RLIM_INFINITY else min(most, hard)
                resource.setrlimit(name, (least, least))
            if os.spawnv(os.P_WAIT, "/bin/cp", ["cp", "-Rp", f"{FILES}/.", "."]):
                os._exit(126)
        else:
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        os.execvp(command[0], command)
    except OSError as error:
        os.write(_ERRORS, f"the command cannot be started: {error.strerror}: {command[0]}\n".encode())
    finally:
        os._exit(127)


def _bridge() -> Callable[[], None]:
    """Listen for the agent's connections; return a function that starts to forward them, in threads."""
    import socket
    import threading

    listener, places = socket.create_server(("127.0.0.1", PORT)), threading.Semaphore(MAX_CONNECTIONS)

    def relay(near: socket.socket) -> None:
        with near, socket.socket(socket.AF_UNIX) as far:
            try:
                far.connect(f"{GATEWAY}/{SOCKET}")
                _relay(near, far)
            except OSError:  # one of the ends is gone
                return
            finally:
                places.release()

    def serve() -> None:
        while places.acquire():
            near, _ = listener.accept()
            threading.Thread(target=relay, args=(near,), daemon=True).start()

    return threading.Thread(target=serve, daemon=True).start


def _relay(near: socket.socket, far: socket.socket) -> None:
    others, poll = {near.fileno(): (near, far), far.fileno(): (far, near)}, select.poll()
    for descriptor in others:
        poll.register(descriptor, select.POLLIN)
    while others:
        for descriptor, _ in poll.poll():
            source, target = others[descriptor]
            if data := source.recv(_PIECE):
                target.sendall(data)
            else:
                target.shutdown(1)  # for writing
                poll.unregister(descriptor)
                del others[descriptor]


def _watch(agent: int, *, is_boxed: bool) -> int:
    """Reap orphans until the agent ends, is too large, or the run closes the socket; return the exit code."""
    poll = select.poll()
    for descriptor in (_RUN, os.pidfd_open(agent)):
        poll.register(descriptor, select.POLLIN)
    newest, looked = 0, 0.0
    while True:
        if any(descriptor == _RUN for descriptor, _ in poll.poll(_TICK_MS)):
            return _KILLED
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == agent:
                code = os.waitstatus_to_exitcode(ended[1])
                return code if code >= 0 else 128 - code
        is_due = time.monotonic() - looked > _LOOK_SECONDS
        if is_boxed and (is_due or abs(_newest() - newest) > _MANY_NEW):
            if excess := _excess(is_quick=not is_due):
                os.write(_ERRORS, f"\n{excess}\n".encode())
                return _KILLED
            newest, looked = _newest(), time.monotonic() if is_due else looked


def _newest() -> int:
    with open("/proc/loadavg", encoding="ascii") as file:  # noqa: PTH123
        return int(file.read().split()[-1])


def _excess(*, is_quick: bool) -> str:
    """Return the limit that the processes of a sandbox break together, or ""; ``is_quick``: many are only counted."""
    pids = list(_pids())
    if len(pids) > MAX_PROCESSES:  # no time to look at each
        return f"it has {len(pids)} processes, limit {MAX_PROCESSES}"
    if is_quick and len(pids) > _FEW:
        return ""
    kilobytes = threads = 0  # resident, without files, which they share
    for pid in pids:
        try:
            with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:  # noqa: PTH123
                lines = [line.split() for line in file if line.startswith(("RssAnon:", "RssShmem:", "Threads:"))]
        except OSError:  # it has ended
            continue
        kilobytes += sum(int(line[1]) for line in lines if line[0] != "Threads:")
        threads += sum(int(line[1]) for line in lines if line[0] == "Threads:")
    if kilobytes > MAX_MEMORY >> 10:
        return f"its processes take {kilobytes >> 10} MiB of memory, limit {MAX_MEMORY >> 20}"
    return f"it has {threads} processes and threads, limit {MAX_PROCESSES}" if threads > MAX_PROCESSES else ""


def _kill_all() -> int:
    """Kill and reap all processes below this one; return the number of those left."""
    deadline = time.monotonic() + _KILL_SECONDS
    while _has_children():
        found = list(descendants(os.getpid()))
        if time.monotonic() > deadline:
            return len(found)
        kill(found)
        time.sleep(0.001)
    return 0


def _has_children() -> bool:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def kill(pids: list[int]) -> None:
    """Kill processes, of which some may have ended."""
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue


def descendants(ancestor: int) -> Iterator[int]:
    """Yield the processes below one, from the table of all processes."""
    children: dict[int, list[int]] = {}
    for pid in _pids():
        try:
            with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:  # noqa: PTH123
                parent = int(file.read().rpartition(")")[2].split()[1])
        except OSError:
            continue
        children.setdefault(parent, []).append(pid)
    waiting = [ancestor]
    while waiting:
        below = children.get(waiting.pop(), [])
        yield from below
        waiting += below


def _pids() -> Iterator[int]:
    return map(int, filter(str.isdigit, os.listdir("/proc")))  # noqa: PTH208


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])

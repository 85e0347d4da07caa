"""Processes of agents: started with a warden each (``warden.py``), and ended with everything that they started."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from rlcore.agents import warden
from rlcore.errors import shown

KEPT_BYTES = 16 << 10  # of the output: its end
MAX_OUTPUT_BYTES = 64 << 20
_PIECE = 1 << 16
_LAST_PIECES = 17  # of output after the end: more than a pipe holds, which a process that escaped may keep open
_END_SECONDS = 15.0  # for a warden to kill its processes


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """End of an agent.

    Attributes:
        code: Exit code, 128 + its number for a signal; None if the agent was ended or did not start.
        output: End of its standard output and standard error.
        error: Reason if it was ended or did not start.
        is_late: True if it timed out.
    """

    code: int | None
    output: str = ""
    error: str = ""
    is_late: bool = False

    @property
    def failure(self) -> str:
        """Reason of the failure with the last line of the output, or ""."""
        how = self.error or (_described(self.code) if self.code else "")
        last = next((line for line in reversed(self.output.splitlines()) if line.strip()), "")
        return f"{how}; last output: {shown(last.strip())}" if how and last else how


class Agents:
    """Running agents. Another thread may end them all; after that none starts."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[_Agent] = set()
        self._is_over = False

    def run(self, command: Sequence[str], environment: Mapping[str, str], folder: Path, *, seconds: float) -> Ended:
        """Run a warden's command to its end, at most ``seconds``; no process of the agent is left."""
        with self._lock:
            if self._is_over:
                return Ended(code=None, error="the run ended before it began")
            try:
                agent = _Agent(command, environment, folder)
            except OSError as error:
                return Ended(code=None, error=f"its process cannot be started: {error}")
            self._running.add(agent)
        try:
            return agent.wait(seconds)
        finally:
            with self._lock:
                self._running.remove(agent)

    def end(self) -> None:
        """End all agents; their ``run`` returns."""
        with self._lock:
            self._is_over = True
            for agent in self._running:
                agent.end("the run ended")


class _Agent:
    def __init__(self, command: Sequence[str], environment: Mapping[str, str], folder: Path) -> None:
        self._reason, self._output, self._size = "", b"", 0
        self._control, far_end = socket.socketpair()
        with far_end, _ahead_of_others():
            self._process = subprocess.Popen(
                command,
                stdin=far_end.fileno(),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                bufsize=0,
                cwd=folder,
                env=dict(environment),
                start_new_session=True,  # Ctrl-C reaches only the run, which then ends its agents
            )

    def end(self, reason: str) -> None:
        """Let the warden kill everything; may be called twice, and from other threads."""
        self._reason = self._reason or reason
        self._process.send_signal(signal.SIGCONT)  # the agent may have stopped it
        with suppress(OSError):  # it has ended
            self._control.shutdown(socket.SHUT_RDWR)

    def wait(self, seconds: float) -> Ended:
        late = f"timed out after {seconds:g} s"
        with self._process as process, self._control, os.fdopen(os.pidfd_open(process.pid), "rb", 0) as handle:
            if not self._follow(handle.fileno(), seconds, MAX_OUTPUT_BYTES):
                is_long = self._size > MAX_OUTPUT_BYTES
                self.end(f"wrote more than {MAX_OUTPUT_BYTES >> 20} MiB of output" if is_long else late)
                if not self._follow(handle.fileno(), _END_SECONDS, sys.maxsize):
                    warden.kill([*warden.descendants(process.pid), process.pid])
        code = None if self._reason else process.returncode
        text = self._output.decode("utf-8", "replace")
        return Ended(code=code, output=text, error=self._reason, is_late=self._reason == late)

    def _follow(self, handle: int, seconds: float, most_bytes: int) -> bool:
        """Read the output until the warden has ended; return False if it does not in time, or if that is too long."""
        assert self._process.stdout is not None
        output, deadline = self._process.stdout.fileno(), time.monotonic() + seconds
        ends, num_left = {handle, output}, _LAST_PIECES
        while (left := deadline - time.monotonic()) > 0.0 and self._size <= most_bytes:
            ready = _ready(ends, left)
            num_left -= handle in ready
            if handle in ready and (output not in ready or not num_left):
                return True
            if output in ready:
                piece = os.read(output, _PIECE)
                self._output, self._size = (self._output + piece)[-KEPT_BYTES:], self._size + len(piece)
                ends -= {output} if not piece else set()
        return False


@contextmanager
def _ahead_of_others() -> Iterator[None]:
    """Start processes of this thread with real-time priority, where the system allows it.

    The kernel does not limit the processes of root, so a warden must be able to count them on a busy machine.
    """
    before = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    except OSError:  # no such right, or a kernel without such priorities
        yield
        return
    try:
        yield
    finally:
        os.sched_setscheduler(0, *before)


def _described(code: int) -> str:
    known = {each.value: each.name for each in signal.Signals}  # real-time signals have no name
    number = -code if code < 0 else code - 128
    name = known.get(number, f"signal {number}")
    if code < 0:
        return f"its warden was ended by {name}"
    return f"exit code {code}" + (f" ({name})" if 0 < number < signal.NSIG else "")


def _ready(descriptors: set[int], seconds: float) -> set[int]:
    """Return the descriptors that can be read or are closed, at the latest after ``seconds``."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return {descriptor for descriptor, _ in poll.poll(seconds * 1000.0)}

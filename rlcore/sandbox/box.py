"""Box: a Python process that can reach only its two pipes. It runs one program and is then killed.

Only supervisors start boxes (see ``supervisor.py``). A box dies with the thread that started it, and the supervisor
reaps the processes that a box leaves behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import time
from typing import Any, Literal

from rlcore.sandbox import runner, wire
from rlcore.sandbox.base import ResourceLimits, RunStatus
from rlcore.sandbox.isolation import Isolation, runner_code, spawn

Role = Literal["candidate", "tester"]
START_SECONDS = 20.0
_PIECE = 1 << 16
_OUT_OF_CPU = (-signal.SIGXCPU, 128 + signal.SIGXCPU)  # exit status of the process; as bwrap reports it


class BoxError(Exception):
    """Failure of the box before it read any byte of the program: an error of rlcore or of the machine."""


class Broken(Exception):  # noqa: N818 - a fact about the program, not an error of rlcore
    """End without a valid answer: ``TIMEOUT``, ``DIED``, or ``PROTOCOL`` for malformed or unrequested data."""

    def __init__(self, status: RunStatus, what: str) -> None:
        super().__init__(what)
        self.status = status


class Box:
    """Started box that sent READY. Use it in a ``with`` block, which kills all its processes.

    Raises:
        BoxError: The box did not send READY.
    """

    def __init__(self, isolation: Isolation, role: Role, limits: ResourceLimits) -> None:
        self._first: int | None = None  # pidfd of the first process in the box: killing it kills all
        code = runner_code()
        arguments = [str(len(code)), role, str(limits.memory_bytes), str(limits.cpu_seconds)]
        try:
            self._process, info = spawn(isolation, arguments)
        except OSError as error:
            raise BoxError(f"the box did not start: {error}") from error
        assert self._process.stdin is not None and self._process.stdout is not None
        self._in, self._out = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._in, False)
        os.set_blocking(self._out, False)
        deadline = time.monotonic() + START_SECONDS
        try:
            self._first = _pidfd(info, self._process.pid, deadline)
            self._write(code, deadline)
            if self._frame(deadline) != runner.READY:
                raise Broken(RunStatus.PROTOCOL, "the first message was not READY")
        except (OSError, ValueError, Broken) as error:
            self._end()
            kind = error.status if isinstance(error, Broken) else type(error).__name__
            raise BoxError(f"the box did not start: {self._stderr() or f'{kind} {error}'}") from error

    def __enter__(self) -> Box:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        self._close()

    def ask(
        self, request: tuple[Any, ...], deadline: float, *, max_bytes: int = wire.MAX_FRAME_BYTES
    ) -> tuple[Any, ...]:
        """Send a request and return the answer, a tuple of plain data that begins with a text.

        Raises:
            Broken: There was no valid answer within ``max_bytes`` and the deadline.
        """
        self.send(request, deadline)
        return self.receive(deadline, max_bytes=max_bytes)

    def send(self, request: tuple[Any, ...], deadline: float) -> None:
        """Send a request. No data may be waiting, because the program answers only requests.

        Raises:
            Broken: As for :meth:`ask`.
        """
        if _is_ready(self._out, select.POLLIN, 0.0):
            self._read(1, deadline)  # raises if the pipe was closed
            raise Broken(RunStatus.PROTOCOL, "unrequested output")
        data = wire.encode(request, max_bytes=wire.MAX_REQUEST_BYTES)
        self._write(len(data).to_bytes(4, "big") + data, deadline)

    def receive(self, deadline: float, *, max_bytes: int = wire.MAX_FRAME_BYTES) -> tuple[Any, ...]:
        """Wait for a frame of at most ``max_bytes`` bytes.

        Raises:
            Broken: As for :meth:`ask`.
        """
        try:
            answer = wire.decode(self._frame(deadline, max_bytes), lambda: _refuse_late(deadline))
        except wire.WireError as error:
            raise Broken(RunStatus.PROTOCOL, str(error)) from error
        if not isinstance(answer, tuple) or not answer or not isinstance(answer[0], str):
            raise Broken(RunStatus.PROTOCOL, "the answer has the wrong shape")
        return answer

    def _frame(self, deadline: float, max_bytes: int = wire.MAX_FRAME_BYTES) -> bytes:
        size = int.from_bytes(self._read(4, deadline), "big")
        if size > max_bytes:
            raise Broken(RunStatus.PROTOCOL, f"the answer has {size} bytes, at most {max_bytes} are allowed")
        return self._read(size, deadline)

    def _read(self, count: int, deadline: float) -> bytes:
        parts = []
        while count:
            _await(self._out, select.POLLIN, deadline)
            part = os.read(self._out, min(count, _PIECE))
            if not part:
                raise self._death()
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

    def _write(self, data: bytes, deadline: float) -> None:
        view = memoryview(data)
        while view:
            _await(self._in, select.POLLOUT, deadline)
            try:
                view = view[os.write(self._in, view[:_PIECE]) :]
            except BrokenPipeError as error:
                raise self._death() from error

    def _death(self) -> Broken:
        """Return the cause of the end: the kernel sends SIGXCPU when ``cpu_seconds`` are used up."""
        if _ends_within(self._process.pid, 1.0) and self._process.wait() in _OUT_OF_CPU:
            return Broken(RunStatus.TIMEOUT, "the CPU time limit was exceeded")
        return Broken(RunStatus.DIED, "the process ended")

    def _end(self) -> None:
        """Kill all processes of the box and reap them. The supervisor, a subreaper, inherits the children of bwrap."""
        if self._first is None:
            self._process.kill()
        else:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._first, signal.SIGKILL)
        if not _ends_within(self._process.pid, 2.0):
            self._process.kill()
        self._process.wait()
        if self._first is not None:
            with contextlib.suppress(ChildProcessError):  # bwrap reaped it
                os.waitid(os.P_PIDFD, self._first, os.WEXITED)
            os.close(self._first)
            self._first = None

    def _stderr(self) -> str:
        assert self._process.stderr is not None
        text = self._process.stderr.read().decode("utf-8", "replace").strip()[-300:]
        self._close()
        return text

    def _close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()


def _pidfd(info: int, own: int, deadline: float) -> int:
    """Return a handle of the first process of the box. A number could be reused by another process."""
    if info < 0:
        return os.pidfd_open(own)
    try:
        data = b""
        while not data.endswith(b"}\n"):
            _await(info, select.POLLIN, deadline)
            piece = os.read(info, 1024)
            if not piece:
                raise Broken(RunStatus.DIED, "bwrap reported no pid")
            data += piece
        return os.pidfd_open(int(json.loads(data)["child-pid"]))
    finally:
        os.close(info)


def _ends_within(pid: int, seconds: float) -> bool:
    """Wait for a process without reaping it. ``Popen.wait`` with a timeout would sleep up to 50 ms at a time."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:  # already reaped
        return True
    try:
        return _is_ready(handle, select.POLLIN, seconds)
    finally:
        os.close(handle)


def _refuse_late(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise Broken(RunStatus.TIMEOUT, "reading the answer exceeded the time limit")


def _await(descriptor: int, event: int, deadline: float) -> None:
    if not _is_ready(descriptor, event, max(deadline - time.monotonic(), 0.0)):
        raise Broken(RunStatus.TIMEOUT, "the time limit was exceeded")


def _is_ready(descriptor: int, event: int, seconds: float) -> bool:
    """Poll a descriptor. ``select`` does not support descriptors above 1,023."""
    poll = select.poll()
    poll.register(descriptor, event)
    return bool(poll.poll(seconds * 1000.0))

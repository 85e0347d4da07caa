"""One box: a Python process that can reach nothing but its two pipes. It is used for one program, then killed.

Only supervisors make boxes (see ``supervisor.py``): a box dies with the thread that made it, and a supervisor inherits
and reaps whatever a box leaves behind.
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
from rlcore.sandbox.base import ResourceLimits
from rlcore.sandbox.isolation import Isolation, runner_code, spawn

Role = Literal["candidate", "tester"]
START_SECONDS = 20.0
_PIECE = 1 << 16
_OUT_OF_CPU = (-signal.SIGXCPU, 128 + signal.SIGXCPU)  # of the process itself; as bwrap passes it on


class BoxError(Exception):
    """The box failed before it had a byte of the program: a error of ours or of the machine."""


class OutOfTime(Exception):  # noqa: N818 - a fact about the program, not an error of ours
    """The deadline passed while the program was due to answer."""


class ProcessDied(Exception):  # noqa: N818 - as above
    """The process ended without an answer."""


class ProtocolViolation(Exception):  # noqa: N818 - as above
    """The program sent what is no answer, or spoke without having been asked."""


class Box:
    """A started box that said READY. Use it in a ``with`` block, which kills every process in it.

    Raises:
        BoxError: it did not say READY.
    """

    def __init__(self, walls: Isolation, role: Role, limits: ResourceLimits) -> None:
        self._first: int | None = None  # pidfd of the first process in the box: killing that kills all
        code = runner_code()
        arguments = [str(len(code)), role, str(limits.memory_bytes), str(limits.cpu_seconds)]
        try:
            self._process, info = spawn(walls, arguments)
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
                raise ProtocolViolation("the first word was not READY")
        except (OSError, ValueError, OutOfTime, ProcessDied, ProtocolViolation) as error:
            self._end()
            raise BoxError(f"the box did not start: {self._said() or f'{type(error).__name__} {error}'}") from error

    def __enter__(self) -> Box:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        self._close()

    def ask(self, request: tuple[Any, ...], deadline: float, *, most: int = wire.MAX_FRAME_BYTES) -> tuple[Any, ...]:
        """Send a request and wait for the answer, a tuple of plain data that begins with a word, of ``most`` bytes.

        Raises:
            OutOfTime, Died, Unruly: instead of an answer.
        """
        self.send(request, deadline)
        return self.receive(deadline, most=most)

    def send(self, request: tuple[Any, ...], deadline: float) -> None:
        """Send a request; nothing may be waiting to be read, because nothing was asked yet.

        Raises:
            OutOfTime, Died, Unruly: as for :meth:`ask`.
        """
        if _is_ready(self._out, select.POLLIN, 0.0):
            self._read(1, deadline)  # an end is no word
            raise ProtocolViolation("it spoke without having been asked")
        data = wire.encode(request, most=wire.MAX_REQUEST_BYTES)
        self._write(len(data).to_bytes(4, "big") + data, deadline)

    def receive(self, deadline: float, *, most: int = wire.MAX_FRAME_BYTES) -> tuple[Any, ...]:
        """Wait for a frame of at most ``most`` bytes.

        Raises:
            OutOfTime, Died, Unruly: as for :meth:`ask`.
        """
        try:
            answer = wire.decode(self._frame(deadline, most), lambda: _refuse_late(deadline))
        except wire.WireError as error:
            raise ProtocolViolation(str(error)) from error
        if not isinstance(answer, tuple) or not answer or not isinstance(answer[0], str):
            raise ProtocolViolation("an answer of another shape")
        return answer

    def _frame(self, deadline: float, most: int = wire.MAX_FRAME_BYTES) -> bytes:
        size = int.from_bytes(self._read(4, deadline), "big")
        if size > most:
            raise ProtocolViolation(f"it announced {size} bytes")
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

    def _death(self) -> OutOfTime | ProcessDied:
        """Why the process ended by itself: the kernel stops with SIGXCPU what used up its ``cpu_seconds``."""
        if _ends_within(self._process.pid, 1.0) and self._process.wait() in _OUT_OF_CPU:
            return OutOfTime("its processor time was up")
        return ProcessDied("the process ended")

    def _end(self) -> None:
        """Kill all processes of the box and reap them; the supervisor, a sub-reaper, inherits what bwrap leaves."""
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

    def _said(self) -> str:
        assert self._process.stderr is not None
        text = self._process.stderr.read().decode("utf-8", "replace").strip()[-300:]
        self._close()
        return text

    def _close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()


def _pidfd(info: int, own: int, deadline: float) -> int:
    """A handle on the first process of the box: by its number inside, another process could take that number."""
    if info < 0:
        return os.pidfd_open(own)
    try:
        said = b""
        while not said.endswith(b"}\n"):
            _await(info, select.POLLIN, deadline)
            piece = os.read(info, 1024)
            if not piece:
                raise ProcessDied("it said no pid")
            said += piece
        return os.pidfd_open(int(json.loads(said)["child-pid"]))
    finally:
        os.close(info)


def _ends_within(pid: int, seconds: float) -> bool:
    """``Popen.wait`` with a timeout sleeps up to 50 ms at a time; this wakes at once."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:  # it has been waited for
        return True
    try:
        return _is_ready(handle, select.POLLIN, seconds)
    finally:
        os.close(handle)


def _refuse_late(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise OutOfTime("its answer took too long to read")


def _await(descriptor: int, event: int, deadline: float) -> None:
    if not _is_ready(descriptor, event, max(deadline - time.monotonic(), 0.0)):
        raise OutOfTime("its time was up")


def _is_ready(descriptor: int, event: int, seconds: float) -> bool:
    """poll, because select knows no descriptor above 1,023."""
    poll = select.poll()
    poll.register(descriptor, event)
    return bool(poll.poll(seconds * 1000.0))

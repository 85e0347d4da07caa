r"""Grading in killable processes, the only timeout that works for C code in any thread.

A ``\\boxed{9^{9^9}}`` keeps the interpreter's lock inside one C power, which no thread or alarm can interrupt. The
kernel ends the worker when a request has used its CPU time; see :mod:`rlcore.rewards.grader_process`.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import psutil

from rlcore.errors import RewardError
from rlcore.rewards.grader_process import MAX_MESSAGE_BYTES, READY

_START_SECONDS = 120.0
_MEMORY_BYTES = 2 << 30
_IDLE_SECONDS = 60.0  # a working worker uses some CPU time within this, even on a busy machine
# Signals that an answer can cause: CPU limit, stack overflow in C code, abort of a library.
_BY_ANSWER = (signal.SIGPROF, signal.SIGSEGV, signal.SIGABRT, signal.SIGFPE, signal.SIGBUS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Result of grading: a JSON ``value`` or an ``error``, never both.

    ``is_of_answer`` is True if the answer caused the error (too much time or memory).
    """

    value: Any = None
    error: str = ""
    is_of_answer: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class _Worker:
    pid: int
    connection: Connection


@dataclass(frozen=True, slots=True)
class _Job:
    request: bytes
    worker: _Worker
    deadline: float  # time by which it has answered, or used more CPU time
    used: float  # CPU time of its worker at the last check


class GraderPool:
    """Worker processes for one of ``GRADERS``, started at the first request; one batch at a time.

    Every request has ``timeout_seconds`` of CPU time; then its worker is killed and replaced. A worker that uses none
    for a minute is replaced without an error. Thread-safe. The processes end with :meth:`close`, the ``with`` block,
    garbage collection of the pool, or this process.
    """

    def __init__(self, grader: str, *, timeout_seconds: float, num_workers: int) -> None:
        self._grader, self._timeout, self._num_workers = grader, timeout_seconds, num_workers
        self._lock = threading.RLock()
        self._fork_server: _ForkServer | None = None
        self._workers: list[_Worker] = []

    def __enter__(self) -> GraderPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def grade_all(self, requests: Sequence[Mapping[str, Any]]) -> list[Outcome]:
        """Grade a batch, in order. Equal requests are graded once.

        Raises:
            RewardError: The grader cannot be started, or a request is larger than 1 MiB.
        """
        encoded = [_encode(request) for request in requests]
        with self._lock:
            outcomes = self._run(list(dict.fromkeys(encoded))) if encoded else {}
        return [outcomes[request] for request in encoded]

    def close(self) -> None:
        """Kill the workers and their parent, and wait for it. The next batch starts new ones."""
        with self._lock:
            for worker in self._workers:
                worker.connection.close()
            self._workers = []
            if self._fork_server is not None:
                self._fork_server.stop()
                self._fork_server = None

    def _run(self, requests: Sequence[bytes]) -> dict[bytes, Outcome]:
        fork_server = self._start()
        outcomes: dict[bytes, Outcome] = {}
        try:
            _Batch(fork_server, self._workers, self._timeout).run(requests, outcomes)
        except (OSError, EOFError) as error:
            lost = Outcome(error=f"the grader process ended: {type(error).__name__}")
            self.close()
            return {request: outcomes.get(request, lost) for request in requests}
        return outcomes

    def _start(self) -> _ForkServer:
        if self._fork_server is None:
            self._fork_server = _ForkServer(self._grader, seconds=self._timeout)
            self._workers = [self._fork_server.fork_worker() for _ in range(self._num_workers)]
        return self._fork_server


class _ForkServer:
    """Caller's handle of the process that forks and kills workers."""

    def __init__(self, grader: str, *, seconds: float) -> None:
        self._control, far_end = socket.socketpair()
        arguments = [str(far_end.fileno()), grader, str(_MEMORY_BYTES), str(seconds)]
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "rlcore.rewards.grader_process", *arguments],
            pass_fds=[far_end.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=_environment(),
            start_new_session=True,  # Ctrl-C reaches only the caller, which then stops this process
        )
        far_end.close()
        self.stop = weakref.finalize(self, _stop, process, self._control)
        self._control.settimeout(_START_SECONDS)
        try:
            reply = self._receive()
        except (OSError, EOFError) as error:
            reply = f"{type(error).__name__}: {error}"
        if reply != READY.decode():
            self.stop()
            what, fix = f"the grader did not start: {reply}", "install what the grader imports"
            raise RewardError(what, where=f"the {grader} grader", fix=fix)

    def fork_worker(self) -> _Worker:
        near_end, far_end = socket.socketpair()
        with far_end:
            socket.send_fds(self._control, [b"fork"], [far_end.fileno()])
            pid = self._receive()
        return _Worker(int(pid), Connection(near_end.detach()))

    def kill(self, worker: _Worker) -> int:
        """Kill a worker and return the number of the signal that ended it, perhaps an earlier one."""
        self._control.sendall(f"kill {worker.pid}".encode())
        number = int(self._receive())
        worker.connection.close()
        return number

    def _receive(self) -> str:
        message = self._control.recv(1024)
        if not message:
            raise EOFError("the control socket was closed")
        return message.decode()


class _Batch:
    """Batch of requests: every idle worker gets one; a reply or a deadline frees it."""

    def __init__(self, fork_server: _ForkServer, workers: list[_Worker], timeout: float) -> None:
        self._fork_server, self._workers, self._timeout = fork_server, workers, timeout
        self._busy: dict[Connection, _Job] = {}

    def run(self, requests: Sequence[bytes], outcomes: dict[bytes, Outcome]) -> None:
        idle, pending = list(self._workers), deque(requests)
        while pending or self._busy:
            while idle and pending:
                self._dispatch(idle.pop(), pending.popleft())
            for connection in self._wait():
                job = self._busy.pop(connection)
                used = _processor_seconds(job.worker)
                if not connection.poll() and used > job.used:
                    self._busy[connection] = replace(job, deadline=time.monotonic() + _IDLE_SECONDS, used=used)
                    continue
                outcomes[job.request], worker = self._collect(job)
                idle.append(worker)

    def _dispatch(self, worker: _Worker, request: bytes) -> None:
        job = _Job(request, worker, time.monotonic() + _IDLE_SECONDS, _processor_seconds(worker))
        self._busy[worker.connection] = job
        try:
            worker.connection.send_bytes(request)
        except BrokenPipeError:
            return  # it died while idle, which the next read detects

    def _wait(self) -> list[Connection]:
        soonest = min(job.deadline for job in self._busy.values())
        wait(list(self._busy), timeout=max(soonest - time.monotonic(), 0.0))
        now = time.monotonic()
        return [c for c, job in self._busy.items() if c.poll() or job.deadline <= now]

    def _collect(self, job: _Job) -> tuple[Outcome, _Worker]:
        if not job.worker.connection.poll():
            silent = Outcome(error="the grader neither answered nor used CPU time, and was killed")
            return silent, self._replaced(job.worker)[0]
        try:
            outcome = Outcome(**json.loads(job.worker.connection.recv_bytes(MAX_MESSAGE_BYTES)))
        except (EOFError, ConnectionResetError):
            fresh, number = self._replaced(job.worker)
            return self._death(number), fresh
        # A worker that failed may be short of memory or damaged: it is not reused.
        return outcome, self._replaced(job.worker)[0] if outcome.error else job.worker

    def _death(self, number: int) -> Outcome:
        if number == signal.SIGPROF:
            return Outcome(error=f"the grader took longer than {self._timeout:g} s", is_of_answer=True)
        return Outcome(error="the grader died on this answer", is_of_answer=number in _BY_ANSWER)

    def _replaced(self, worker: _Worker) -> tuple[_Worker, int]:
        number = self._fork_server.kill(worker)
        fresh = self._fork_server.fork_worker()
        self._workers[self._workers.index(worker)] = fresh
        return fresh, number


def _processor_seconds(worker: _Worker) -> float:
    try:
        times = psutil.Process(worker.pid).cpu_times()
    except psutil.NoSuchProcess:  # its parent died too
        return 0.0
    return float(times.user + times.system)


def _encode(request: Mapping[str, Any]) -> bytes:
    text = json.dumps(request, ensure_ascii=False)  # escapes are up to three times longer
    encoded = text.encode("utf-8", "surrogatepass")
    if len(encoded) > MAX_MESSAGE_BYTES:
        what = f"a grading request of {len(encoded)} bytes is larger than 1 MiB"
        raise RewardError(what, fix="shorten the reference")
    return encoded


def _environment() -> dict[str, str]:
    """Return the search path and thread limits only: no secrets reach a process that reads model output."""
    root = str(Path(__file__).resolve().parents[2])
    kept = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return kept | threads | {"PYTHONPATH": root, "PYTHONHASHSEED": "0", "LANG": "C.UTF-8"}


def _stop(process: subprocess.Popen[bytes], control: socket.socket) -> None:
    control.close()
    try:
        process.wait(timeout=5.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()

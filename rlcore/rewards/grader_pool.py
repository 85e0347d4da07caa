"""Grading in killable processes: the only timeout that holds against C code, in any thread.

A ``\\boxed{9^{9^9}}`` keeps the interpreter's lock inside one C power: neither a thread nor an alarm can interrupt
it. Here the kernel ends the worker when a request has used its processor time; see
:mod:`rlcore.rewards.grader_process`.
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
from types import TracebackType
from typing import Any

import psutil

from rlcore.errors import RewardError
from rlcore.rewards.grader_process import MAX_MESSAGE_BYTES, READY

_START_SECONDS = 120.0
_MEMORY_BYTES = 2 << 30
_PATIENCE_SECONDS = 60.0  # in which a worker that works has used some processor time, on the busiest machine
# What an answer can do to its worker: use up its time, or its stack in C code, or make a library give up.
_BY_ANSWER = (signal.SIGPROF, signal.SIGSEGV, signal.SIGABRT, signal.SIGFPE, signal.SIGBUS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What the grader said: a JSON ``value``, or an ``error`` (never both).

    ``is_of_answer``: the error is the answer's own doing (its time was up, it took too much memory), none of ours.
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
    deadline: float  # by which it has answered, or used more processor time
    used: float  # by its worker, when that was last asked


class GraderPool:
    """A set of worker processes that run one of ``GRADERS``; started at the first request, one batch at a time.

    Every request has ``timeout_seconds`` of processor time, then its worker is killed and replaced. A worker that uses
    none for a minute is replaced too, and that is no fault of the request. Safe to call from several threads. Processes
    end with :meth:`close`, with the ``with`` block, when the pool is collected, or when this process ends in any way.
    """

    def __init__(self, grader: str, *, timeout_seconds: float, num_workers: int) -> None:
        self._grader, self._timeout, self._num_workers = grader, timeout_seconds, num_workers
        self._lock = threading.RLock()
        self._nursery: _Nursery | None = None
        self._workers: list[_Worker] = []

    def __enter__(self) -> GraderPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def grade_all(self, requests: Sequence[Mapping[str, Any]]) -> list[Outcome]:
        """Grade a batch, in order; equal requests are graded once.

        Raises:
            RewardError: the grader cannot be started, or a request is larger than 1 MiB.
        """
        encoded = [_encode(request) for request in requests]
        with self._lock:
            outcomes = self._run(list(dict.fromkeys(encoded))) if encoded else {}
        return [outcomes[request] for request in encoded]

    def close(self) -> None:
        """Kill the workers and their parent, and wait for it; the next batch starts new ones."""
        with self._lock:
            for worker in self._workers:
                worker.connection.close()
            self._workers = []
            if self._nursery is not None:
                self._nursery.stop()
                self._nursery = None

    def _run(self, requests: Sequence[bytes]) -> dict[bytes, Outcome]:
        nursery = self._start()
        outcomes: dict[bytes, Outcome] = {}
        try:
            _Round(nursery, self._workers, self._timeout).run(requests, outcomes)
        except (OSError, EOFError) as error:
            lost = Outcome(error=f"the grader process ended: {type(error).__name__}")
            self.close()
            return {request: outcomes.get(request, lost) for request in requests}
        return outcomes

    def _start(self) -> _Nursery:
        if self._nursery is None:
            self._nursery = _Nursery(self._grader, seconds=self._timeout)
            self._workers = [self._nursery.fork_worker() for _ in range(self._num_workers)]
        return self._nursery


class _Nursery:
    """The caller's handle on the process that forks and kills workers."""

    def __init__(self, grader: str, *, seconds: float) -> None:
        self._control, theirs = socket.socketpair()
        arguments = [str(theirs.fileno()), grader, str(_MEMORY_BYTES), str(seconds)]
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "rlcore.rewards.grader_process", *arguments],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=_environment(),
            start_new_session=True,  # Ctrl-C is for the caller, who then ends this one in order
        )
        theirs.close()
        self.stop = weakref.finalize(self, _stop, process, self._control)
        self._control.settimeout(_START_SECONDS)
        self._await_ready(grader)

    def fork_worker(self) -> _Worker:
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._control, [b"fork"], [theirs.fileno()])
            pid = self._receive()
        return _Worker(int(pid), Connection(ours.detach()))

    def kill(self, worker: _Worker) -> int:
        """End a worker; the number of the signal that ended it, which may have been sent before."""
        self._control.sendall(f"kill {worker.pid}".encode())
        number = int(self._receive())
        worker.connection.close()
        return number

    def _await_ready(self, grader: str) -> None:
        try:
            said = self._receive()
        except (OSError, EOFError) as error:
            said = f"{type(error).__name__}: {error}"
        if said != READY.decode():
            self.stop()
            raise RewardError(
                f"the grader cannot start: {said}", where=f"the {grader} grader", fix="install what the grader imports"
            )

    def _receive(self) -> str:
        message = self._control.recv(1024)
        if not message:
            raise EOFError("the control socket was closed")
        return message.decode()


class _Round:
    """One batch: every idle worker gets a request; a reply or a deadline frees it."""

    def __init__(self, nursery: _Nursery, workers: list[_Worker], timeout: float) -> None:
        self._nursery, self._workers, self._timeout = nursery, workers, timeout
        self._busy: dict[Connection, _Job] = {}

    def run(self, requests: Sequence[bytes], outcomes: dict[bytes, Outcome]) -> None:
        """Fill ``outcomes``, also with what was graded before an exception."""
        idle, pending = list(self._workers), deque(requests)
        while pending or self._busy:
            while idle and pending:
                self._dispatch(idle.pop(), pending.popleft())
            for connection in self._wait():
                job = self._busy.pop(connection)
                used = _processor_seconds(job.worker)
                if not connection.poll() and used > job.used:
                    self._busy[connection] = replace(job, deadline=time.monotonic() + _PATIENCE_SECONDS, used=used)
                    continue
                outcomes[job.request], worker = self._collect(job)
                idle.append(worker)

    def _dispatch(self, worker: _Worker, request: bytes) -> None:
        job = _Job(request, worker, time.monotonic() + _PATIENCE_SECONDS, _processor_seconds(worker))
        self._busy[worker.connection] = job
        try:
            worker.connection.send_bytes(request)
        except BrokenPipeError:
            return  # it died while idle: reading from it says so

    def _wait(self) -> list[Connection]:
        """The connections that have a reply or whose deadline has passed."""
        soonest = min(job.deadline for job in self._busy.values())
        wait(list(self._busy), timeout=max(soonest - time.monotonic(), 0.0))
        now = time.monotonic()
        return [c for c, job in self._busy.items() if c.poll() or job.deadline <= now]

    def _collect(self, job: _Job) -> tuple[Outcome, _Worker]:
        """What came of a request, and the worker for the next one."""
        if not job.worker.connection.poll():
            silent = Outcome(error="the grader was silent, without using its time, and was killed")
            return silent, self._replaced(job.worker)[0]
        try:
            outcome = Outcome(**json.loads(job.worker.connection.recv_bytes(MAX_MESSAGE_BYTES)))
        except (EOFError, ConnectionResetError):
            fresh, number = self._replaced(job.worker)
            return self._death(number), fresh
        # A worker that failed once may be short of memory or half broken: it is not used again.
        return outcome, self._replaced(job.worker)[0] if outcome.error else job.worker

    def _death(self, number: int) -> Outcome:
        if number == signal.SIGPROF:
            return Outcome(error=f"the grader took longer than {self._timeout:g} s", is_of_answer=True)
        return Outcome(error="the grader died on this answer", is_of_answer=number in _BY_ANSWER)

    def _replaced(self, worker: _Worker) -> tuple[_Worker, int]:
        """A new worker in place of one that is ended, and the signal that ended that."""
        number = self._nursery.kill(worker)
        fresh = self._nursery.fork_worker()
        self._workers[self._workers.index(worker)] = fresh
        return fresh, number


def _processor_seconds(worker: _Worker) -> float:
    try:
        times = psutil.Process(worker.pid).cpu_times()
    except psutil.NoSuchProcess:  # its parent has died too
        return 0.0
    return float(times.user + times.system)


def _encode(request: Mapping[str, Any]) -> bytes:
    encoded = json.dumps(request, ensure_ascii=False).encode(
        "utf-8", "surrogatepass"
    )  # escapes are up to three times longer
    if len(encoded) > MAX_MESSAGE_BYTES:
        raise RewardError(
            f"a grading request of {len(encoded)} bytes is larger than 1 MiB", fix="shorten the reference"
        )
    return encoded


def _environment() -> dict[str, str]:
    """Nothing of the caller's environment but the search path: no secrets reach a process that reads model output."""
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

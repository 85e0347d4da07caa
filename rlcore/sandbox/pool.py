"""The caller's side of the sandbox: a set of supervisors, each with at most one program at a time."""

from __future__ import annotations

import dataclasses
import json
import os
import queue
import shutil
import socket
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from rlcore.errors import SandboxError
from rlcore.sandbox.base import DEFAULT_LIMITS, ResourceLimits, RunResult, RunStatus
from rlcore.sandbox.box import START_SECONDS
from rlcore.sandbox.image import box_image
from rlcore.sandbox.isolation import Isolation
from rlcore.sandbox.program_check import MAX_BOXES, MAX_REPEATS
from rlcore.sandbox.selftest import self_test
from rlcore.sandbox.suite import parse_suite
from rlcore.sandbox.supervisor import MAX_MESSAGE_BYTES

Backend = Literal["bubblewrap", "unprotected"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A program to check: ``reference`` is the JSON of :mod:`rlcore.sandbox.suite`.

    ``stop_early``: what comes after the first test that did not pass is not run and has its outcome.
    """

    reference: str
    code: str
    limits: ResourceLimits = DEFAULT_LIMITS
    stop_early: bool = False


class SandboxPool:
    """Runs programs in ``num_workers`` boxes at a time. Starts and tests itself at the first use.

    ``backend``: ``bubblewrap``, or ``unprotected``, which has no walls at all: programs run with the rights of this
    user. It is there for machines on which nobody can be harmed, is never chosen for you, and warns.

    Safe to call from several threads. Processes end with :meth:`close`, with the ``with`` block, when the pool is
    collected, or when this process ends in any way.
    """

    def __init__(self, *, num_workers: int = 2, backend: Backend = "bubblewrap") -> None:
        self._num_workers, self._backend = num_workers, backend
        self._lock = threading.RLock()
        self._idle: queue.SimpleQueue[_Supervisor] = queue.SimpleQueue()
        self._all: list[_Supervisor] = []

    def __enter__(self) -> SandboxPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(self, code: str, *, stdin: str = "", limits: ResourceLimits = DEFAULT_LIMITS) -> RunResult:
        """Run a Python program to its end: ``PASS`` with what it printed when it ended by itself, without an exception.

        Raises:
            SandboxError: programs cannot be isolated on this machine; says how to fix it.
        """
        self._start()
        return self._run(code, stdin, limits)

    def check(self, job: Job) -> tuple[RunResult, ...]:
        """One outcome per test of the job.

        Raises:
            SandboxError: as :meth:`run`.
            ValueError: the reference is no code task.
        """
        self._start()
        return self._check(job)

    def check_all(self, jobs: Sequence[Job]) -> list[tuple[RunResult, ...]]:
        """Check many, ``num_workers`` at a time; the results are in the order of the jobs.

        Raises:
            SandboxError, ValueError: as :meth:`check`.
        """
        self._start()
        with ThreadPoolExecutor(self._num_workers) as threads:
            return list(threads.map(self._check, jobs))

    def close(self) -> None:
        """End the supervisors and their boxes, and wait for them; the next use starts them anew."""
        with self._lock:
            for supervisor in self._all:
                supervisor.stop()
            self._all = []
            self._idle = queue.SimpleQueue()

    def _start(self) -> None:
        with self._lock:
            if self._all:
                return
            walls = _walls(self._backend)
            self._all = [_Supervisor(walls) for _ in range(self._num_workers)]
            for supervisor in self._all:
                self._idle.put(supervisor)
            if self._backend == "unprotected":
                return
            try:
                self_test(lambda code, limits: self._run(code, "", limits), self._self_check)
            except SandboxError:
                self.close()
                raise

    def _self_check(self, reference: str, code: str, limits: ResourceLimits) -> tuple[RunResult, ...]:
        return self._check(Job(reference=reference, code=code, limits=limits))

    def _run(self, code: str, stdin: str, limits: ResourceLimits) -> RunResult:
        request = {"code": code, "stdin": stdin, "limits": dataclasses.asdict(limits)}
        return self._ask(request, 1, limits)[0]

    def _check(self, job: Job) -> tuple[RunResult, ...]:
        return self._ask(dataclasses.asdict(job), len(parse_suite(job.reference).tests), job.limits)

    def _ask(self, request: Mapping[str, Any], count: int, limits: ResourceLimits) -> tuple[RunResult, ...]:
        """What a supervisor says; a supervisor that fails is replaced, and its failure is ours."""
        message = json.dumps(request).encode()
        if len(message) > MAX_MESSAGE_BYTES:
            reason = f"the program and its tests are {len(message)} bytes as JSON, more than {MAX_MESSAGE_BYTES}"
            return (RunResult(status=RunStatus.INFRA, error=reason),) * count
        supervisor = self._idle.get()
        try:
            outcomes = supervisor.ask(message, _patience(count, limits))
        except (OSError, EOFError, TimeoutError) as error:
            supervisor.stop()
            with self._lock:
                self._all = [one for one in self._all if one is not supervisor]
                supervisor = _Supervisor(_walls(self._backend))
                self._all.append(supervisor)
            outcomes = (RunResult(status=RunStatus.INFRA, error=f"the supervisor ended: {error!r}"),) * count
        self._idle.put(supervisor)
        return outcomes


class _Supervisor:
    """The caller's handle on one supervisor."""

    def __init__(self, walls: Isolation) -> None:
        ours, theirs = socket.socketpair()
        arguments = [str(theirs.fileno()), walls.bwrap, walls.image]
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "rlcore.sandbox.supervisor", *arguments],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env={"PYTHONPATH": str(Path(__file__).resolve().parents[2]), "LANG": "C.UTF-8"} | _library_path(),
                start_new_session=True,  # Ctrl-C is for the caller, who then ends this one in order
            )
        self._connection = Connection(ours.detach())
        self.stop = weakref.finalize(self, _stop, process, self._connection)

    def ask(self, message: bytes, patience: float) -> tuple[RunResult, ...]:
        """
        Raises:
            OSError, EOFError, TimeoutError: the supervisor has ended, or does not answer.
        """
        self._connection.send_bytes(message)
        if not self._connection.poll(patience):
            raise TimeoutError(f"no answer in {patience:g} s")
        said = json.loads(self._connection.recv_bytes(MAX_MESSAGE_BYTES))
        return tuple(RunResult(**(one | {"status": RunStatus(one["status"])})) for one in said)


def _walls(backend: Backend) -> Isolation:
    """
    Raises:
        SandboxError: bubblewrap is not installed, or the files of a box cannot be made.
    """
    if backend == "unprotected":
        warnings.warn(
            "programs run UNPROTECTED: model output runs with all rights of this user",
            category=RuntimeWarning,
            stacklevel=2,
        )
        return Isolation()
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise SandboxError(
            "bubblewrap is not installed, so untrusted programs cannot be isolated",
            fix="infra/install_sandbox.sh (or: apt-get install bubblewrap); on a machine without Linux use another one",
        )
    return Isolation(bwrap=bwrap, image=str(box_image() / "root"))


def _patience(count: int, limits: ResourceLimits) -> float:
    """Longer than a supervisor can take that works as it should: every box in vain, every test to its limit."""
    boxes, tests = MAX_BOXES + 1, count + MAX_BOXES + MAX_REPEATS
    return 30.0 + 3 * boxes * 2 * START_SECONDS + tests * limits.wall_seconds


def _library_path() -> dict[str, str]:
    return {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}


def _stop(process: subprocess.Popen[bytes], connection: Connection) -> None:
    connection.close()
    process.kill()  # its boxes die with it
    process.wait()

"""Sandbox of the caller: a set of supervisors, each running at most one program at a time.

Attacks run before the first program: a sandbox with incomplete isolation is never used. A control confirms that the box
runs programs: in a broken box every attack would fail.
"""

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
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

from rlcore.errors import SandboxError
from rlcore.sandbox.base import DEFAULT_LIMITS, FIX, ResourceLimits, RunResult, RunStatus
from rlcore.sandbox.box import START_SECONDS
from rlcore.sandbox.image import box_image
from rlcore.sandbox.isolation import Isolation
from rlcore.sandbox.program_check import MAX_BOXES, MAX_REPEATS
from rlcore.sandbox.suite import parse_suite
from rlcore.sandbox.supervisor import MAX_MESSAGE_BYTES

Backend = Literal["bubblewrap", "unprotected"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """Program to check. ``reference`` is the JSON of ``code_tasks/v1``.

    Attributes:
        stop_early: Skip the tests after the first failure; they get its result.
    """

    reference: str
    code: str
    limits: ResourceLimits = DEFAULT_LIMITS
    stop_early: bool = False


class SandboxPool:
    """Sandbox that runs programs in ``num_workers`` boxes. It starts and tests itself on first use. Thread-safe.

    ``backend = "unprotected"`` has no isolation: programs run with the rights of this user. It is never chosen
    automatically, and warns. Its processes end with :meth:`close`, ``with``, garbage collection, or this process.
    """

    def __init__(self, *, num_workers: int = 2, backend: Backend = "bubblewrap") -> None:
        self._num_workers, self._backend = num_workers, backend
        self._lock = threading.RLock()
        self._idle: queue.SimpleQueue[_Supervisor] = queue.SimpleQueue()
        self._all: list[_Supervisor] = []

    def __enter__(self) -> SandboxPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, code: str, *, stdin: str = "", limits: ResourceLimits = DEFAULT_LIMITS) -> RunResult:
        """Run a Python program to its end. ``PASS`` means that it ended without an exception.

        Raises:
            SandboxError: Programs cannot be isolated on this machine.
        """
        self._start()
        return self._run(code, limits, stdin)

    def check(self, job: Job) -> tuple[RunResult, ...]:
        """Return one result per test of the job.

        Raises:
            SandboxError: As for :meth:`run`.
            ValueError: The reference is not a code task.
        """
        self._start()
        return self._check(job)

    def check_all(self, jobs: Sequence[Job]) -> list[tuple[RunResult, ...]]:
        """Check several jobs, ``num_workers`` at a time. Results are in the order of the jobs.

        Raises:
            SandboxError, ValueError: As for :meth:`check`.
        """
        self._start()
        with ThreadPoolExecutor(self._num_workers) as threads:
            return list(threads.map(self._check, jobs))

    def close(self) -> None:
        """Stop the supervisors and their boxes; the next use restarts them."""
        with self._lock:
            for supervisor in self._all:
                supervisor.stop()
            self._all = []
            self._idle = queue.SimpleQueue()

    def _start(self) -> None:
        with self._lock:
            if self._all:
                return
            isolation = _isolation(self._backend)
            self._all = [_Supervisor(isolation) for _ in range(self._num_workers)]
            for supervisor in self._all:
                self._idle.put(supervisor)
            if self._backend == "unprotected":
                return
            try:
                self_test(self._run, self._check)
            except SandboxError:
                self.close()
                raise

    def _run(self, code: str, limits: ResourceLimits, stdin: str = "") -> RunResult:
        request = {"code": code, "stdin": stdin, "limits": dataclasses.asdict(limits)}
        return self._ask(request, 1, limits)[0]

    def _check(self, job: Job) -> tuple[RunResult, ...]:
        return self._ask(dataclasses.asdict(job), len(parse_suite(job.reference).tests), job.limits)

    def _ask(self, request: Mapping[str, Any], count: int, limits: ResourceLimits) -> tuple[RunResult, ...]:
        message = json.dumps(request).encode()
        if len(message) > MAX_MESSAGE_BYTES:
            reason = f"the program and its tests are {len(message)} bytes as JSON, more than {MAX_MESSAGE_BYTES}"
            return (RunResult(status=RunStatus.INFRA, error=reason),) * count
        supervisor = self._idle.get()
        try:
            outcomes = supervisor.ask(message, _answer_seconds(count, limits))
        except (OSError, EOFError, TimeoutError) as error:
            supervisor.stop()
            with self._lock:
                self._all = [one for one in self._all if one is not supervisor]
                supervisor = _Supervisor(_isolation(self._backend))
                self._all.append(supervisor)
            outcomes = (RunResult(status=RunStatus.INFRA, error=f"the supervisor ended: {error!r}"),) * count
        self._idle.put(supervisor)
        return outcomes


class _Supervisor:
    def __init__(self, isolation: Isolation) -> None:
        near_end, far_end = socket.socketpair()
        arguments = [str(far_end.fileno()), isolation.bwrap, isolation.image]
        libraries = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
        with far_end:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "rlcore.sandbox.supervisor", *arguments],
                pass_fds=[far_end.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env={"PYTHONPATH": str(Path(__file__).resolve().parents[2]), "LANG": "C.UTF-8"} | libraries,
                start_new_session=True,  # Ctrl-C reaches only the caller, which then stops the supervisor
            )
        self._connection = Connection(near_end.detach())
        self.stop = weakref.finalize(self, _stop, process, self._connection)

    def ask(self, message: bytes, timeout: float) -> tuple[RunResult, ...]:
        self._connection.send_bytes(message)
        if not self._connection.poll(timeout):
            raise TimeoutError(f"no answer in {timeout:g} s")
        answer = json.loads(self._connection.recv_bytes(MAX_MESSAGE_BYTES))
        return tuple(RunResult(**(one | {"status": RunStatus(one["status"])})) for one in answer)


def _isolation(backend: Backend) -> Isolation:
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
            fix="as root: apt-get install bubblewrap (Fedora: dnf install bubblewrap); it needs Linux",
        )
    return Isolation(bwrap=bwrap, image=str(box_image() / "root"))


def _answer_seconds(count: int, limits: ResourceLimits) -> float:
    """Return a bound for a working supervisor: every box fails to start, every test takes its limit."""
    boxes, tests = MAX_BOXES + 1, count + MAX_BOXES + MAX_REPEATS
    return 30.0 + 3 * boxes * 2 * START_SECONDS + tests * limits.wall_seconds


def _stop(process: subprocess.Popen[bytes], connection: Connection) -> None:
    connection.close()
    process.kill()  # its boxes die with it
    process.wait()


_ATTACKS = r"""
import ctypes, json, os, socket

libc = ctypes.CDLL(None, use_errno=True)

def fork():
    if os.fork() == 0:
        os._exit(0)

def network():
    socket.socket(socket.AF_INET, socket.SOCK_STREAM)

def unix_socket():
    socket.socketpair()

def write_a_file():
    for folder in ("/", "/tmp", "/dev", "/dev/shm", "/python", "/lib", "/var/tmp", "/run"):
        try:
            open(folder + "/x", "w")
        except OSError:
            continue
        return
    raise OSError

def read_the_host():
    for path in ("/etc/passwd", "/proc/self/status", "/proc/1/environ", "/home", "/root", "/sys", "/bin/sh"):
        if os.path.exists(path):
            return
    raise OSError

def see_other_processes():
    if os.getppid() > 1:
        return
    raise OSError

def inherit_a_secret():
    if set(os.environ) <= {"LD_LIBRARY_PATH", "PWD", "LC_CTYPE"}:
        raise OSError

def inherit_a_descriptor():
    for number in range(3, 30):
        try:
            os.fstat(number)
        except OSError:
            continue
        return
    raise OSError

def take_memory():
    bytearray(1 << 30)

def be_root():
    if os.getuid() not in (0,):
        os.setuid(0)

def memory_file():
    os.memfd_create("x")

def new_namespace():
    if libc.unshare(0x10000000) < 0:
        raise OSError

def mount():
    if libc.mount(b"none", b"/", b"tmpfs", 0, None) < 0:
        raise OSError

def trace():
    if libc.ptrace(0, 0, None, None) < 0:
        raise OSError

succeeded = []
for attack in (fork, network, unix_socket, write_a_file, read_the_host, see_other_processes, inherit_a_secret,
               inherit_a_descriptor, take_memory, be_root, memory_file, new_namespace, mount, trace):
    try:
        attack()
    except (OSError, MemoryError):
        continue
    succeeded.append(attack.__name__)
print(json.dumps({"control": 6 * 7, "succeeded": succeeded}))
"""
_REFERENCE = json.dumps(
    {"style": "assert", "entry_point": "double", "tests": ["assert double(21) == 42", "assert double(0) == 0"]}
)
_FORGERIES = {
    "an exit at import": "import os; os._exit(0)",
    "an object that equals everything": "class Any:\n def __eq__(self, _): return True\ndef double(x): return Any()",
    "a forged verdict": "import os\nos.write(31, b'\\0\\0\\0\\x17u4:s7:verdicts1:xs4:passs0:')\ndouble = abs",
    "a wrong answer": "def double(x): return 42",
}
_LIMITS = ResourceLimits(wall_seconds=10.0)


def self_test(run: Callable[[str, ResourceLimits], RunResult], check: Callable[[Job], Sequence[RunResult]]) -> None:
    """Run the attacks through a sandbox's functions.

    Raises:
        SandboxError: Boxes do not start, or their isolation is incomplete. No other program was run.
    """
    outcome = run(_ATTACKS, _LIMITS)
    if outcome.status is not RunStatus.PASS:
        raise SandboxError(f"the sandbox does not work on this machine: {outcome.status}: {outcome.error}", fix=FIX)
    report = json.loads(outcome.stdout)
    if report["control"] != 42 or report["succeeded"]:
        raise SandboxError(f"the sandbox is not isolated: a program could {', '.join(report['succeeded'])}", fix=FIX)
    if run("while True: pass", ResourceLimits(wall_seconds=0.3)).status is not RunStatus.TIMEOUT:
        raise SandboxError("the sandbox is not isolated: an endless loop was not stopped")
    right = check(_job("def double(x): return 2 * x"))
    if any(one.status is not RunStatus.PASS for one in right):
        raise SandboxError(
            f"the sandbox does not work on this machine: a correct program failed: {right[0].error}", fix=FIX
        )
    for name, code in _FORGERIES.items():
        if all(one.status is RunStatus.PASS for one in check(_job(code))):
            raise SandboxError(f"the sandbox is not isolated: {name} passed the tests")


def _job(code: str) -> Job:
    return Job(reference=_REFERENCE, code=code, limits=_LIMITS)

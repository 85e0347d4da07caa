"""Sandbox protocol: run an untrusted program and return its output. A program never decides its own result.

A program's output is data, which the caller compares outside the box.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol


class RunStatus(StrEnum):
    """End of a run. All values describe the program except ``INFRA``, a failure of rlcore or the machine.

    - ``PASS``: It finished, with the expected output if one was given.
    - ``FAIL``: It finished with another output.
    - ``ERROR``: It raised an exception.
    - ``TIMEOUT``: It exceeded its time limit.
    - ``DIED``: The process ended without a reply (exit, signal, memory).
    - ``PROTOCOL``: It sent malformed data.
    - ``INFRA``: The box did not start.
    """

    PASS = "pass"
    FAIL = "fail"
    ERROR = "error"
    TIMEOUT = "timeout"
    DIED = "died"
    PROTOCOL = "protocol"
    INFRA = "infra"


@dataclass(frozen=True, kw_only=True, slots=True)
class ResourceLimits:
    """Resource limits of one program.

    Attributes:
        wall_seconds: Limit per input.
        cpu_seconds: Limit for the life of the process.
        memory_bytes: Size of the address space, including thread stacks.
        output_bytes: Maximum output per input, or twice the expected output if that is larger. More is ``PROTOCOL``.
    """

    wall_seconds: float = 5.0
    cpu_seconds: int = 5
    memory_bytes: int = 1 << 30
    output_bytes: int = 256 << 10


DEFAULT_LIMITS = ResourceLimits()
FIX = (
    "allow unprivileged user namespaces (Debian: sysctl kernel.unprivileged_userns_clone=1; Ubuntu 24.04: sysctl "
    "kernel.apparmor_restrict_unprivileged_userns=0; in a container: a seccomp profile that allows unshare and mount)"
)
"""Settings of a machine that let programs be isolated."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
    """Status of a run and its output. ``error`` is the exception with its line, or the cause of the failure."""

    status: RunStatus
    stdout: str = ""
    error: str = ""


class Sandbox(Protocol):
    """Runner of programs, each in a new box. Thread-safe."""

    def run(self, code: str, *, stdin: str = "", limits: ResourceLimits = DEFAULT_LIMITS) -> RunResult:
        """Run a Python program to its end; ``PASS`` if it raised nothing.

        Raises:
            SandboxError: Programs cannot be isolated on this machine.
        """
        ...

    def close(self) -> None: ...

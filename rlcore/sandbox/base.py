"""What a sandbox is: it runs an untrusted program and says what came out. It never lets the program judge itself.

A program's output is data. Whether that data is right is decided by the caller, outside the box; the exit code of the
program, what it prints about itself and what it writes to files never are a verdict.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol


class RunStatus(StrEnum):
    """How a run ended. All but ``INFRA`` are facts about the program; ``INFRA`` is a failure of ours, never an answer.

    ``PASS``: it ran to its end (and, where something was expected, that came out). ``FAIL``: it ran, and something else
    came out. ``ERROR``: it raised an exception. ``TIMEOUT``: its time was up. ``DIED``: the process ended without a
    word (exit, signal, memory). ``PROTOCOL``: it sent something that is no answer. ``INFRA``: the box did not start.
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
    """What one program may use.

    ``wall_seconds`` counts for each input by itself, ``cpu_seconds`` for the life of the process. ``memory_bytes`` is
    its address space, of which the stack of a thread is a part. ``output_bytes``: the longest output of one input, or
    twice what a test expects where that is more; what goes beyond is ``PROTOCOL``.
    """

    wall_seconds: float = 5.0
    cpu_seconds: int = 5
    memory_bytes: int = 1 << 30
    output_bytes: int = 256 << 10


DEFAULT_LIMITS = ResourceLimits()


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
    """How a program ended and what it printed; ``error`` is its exception with the line, or what went wrong."""

    status: RunStatus
    stdout: str = ""
    error: str = ""


class Sandbox(Protocol):
    """Runs programs, each in a box of its own that is used once. Safe to call from several threads."""

    def run(self, code: str, *, stdin: str = "", limits: ResourceLimits = DEFAULT_LIMITS) -> RunResult:
        """Run a Python program to its end: ``PASS`` with what it printed when it ended by itself, without an exception.

        Raises:
            SandboxError: programs cannot be isolated on this machine; says how to fix it.
        """
        ...

    def close(self) -> None:
        """End the processes that the sandbox holds."""
        ...

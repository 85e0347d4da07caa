"""Python tool: the policy writes a program for a sandbox and reads its output."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from rlcore.environments.base import ToolFailure, ToolOutput, error_output
from rlcore.sandbox.base import ResourceLimits, RunResult, RunStatus, Sandbox

NUM_AT_ONCE = 4
_WITHOUT_WORDS = {
    RunStatus.TIMEOUT: "the program's time was up",
    RunStatus.DIED: "the program ended without a word: it used too much memory, or ended itself",
    RunStatus.PROTOCOL: "the program printed too much",
}


class PythonTool:
    """Tool that runs each program in a new box, without state between calls.

    Errors of a program are text for the policy (the last line of its traceback). A sandbox failure is a
    :class:`ToolFailure`.
    """

    name = "python"
    describes = "Runs a Python program, and says what it printed. Nothing is kept between two calls."

    def __init__(self, sandbox: Sandbox, *, timeout_seconds: float) -> None:
        self._sandbox = sandbox
        self._limits = ResourceLimits(wall_seconds=timeout_seconds, cpu_seconds=math.ceil(timeout_seconds) + 1)

    def __call__(self, arguments: Sequence[str]) -> list[ToolOutput | ToolFailure]:
        """Return the output of each program.

        Raises:
            SandboxError: Programs cannot be isolated on this machine.
        """
        with ThreadPoolExecutor(NUM_AT_ONCE) as threads:
            return [_to_output(outcome) for outcome in threads.map(self._run, arguments)]

    def _run(self, code: str) -> RunResult:
        return self._sandbox.run(code, limits=self._limits)


def _to_output(outcome: RunResult) -> ToolOutput | ToolFailure:
    if outcome.status is RunStatus.INFRA:
        return ToolFailure(reason=outcome.error or "the box did not start")
    if outcome.status is RunStatus.PASS:
        return ToolOutput(text=outcome.stdout.strip() or "nothing was printed")
    lines = outcome.error.strip().splitlines()
    return error_output(_WITHOUT_WORDS.get(outcome.status, lines[-1] if lines else "the program failed"))

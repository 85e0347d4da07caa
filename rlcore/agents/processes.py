"""Processes of agents: started with a warden each (``warden.py``), and ended with everything that they started."""

from __future__ import annotations

import json
import select
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from rlcore.errors import SandboxError, shown

_REPORT_SECONDS = 30.0  # for the warden to kill its processes and report


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """End of an agent.

    Attributes:
        code: Exit code, negative for a signal; None if the agent was ended.
        output: End of its standard output and standard error.
        error: Reason if it was ended or could not start.
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
        """Run a warden's command to its end, at most ``seconds``; no process of the agent is left.

        Raises:
            SandboxError: The warden or its sandbox did not start.
        """
        with self._lock:
            if self._is_over:
                return Ended(code=None, error="the run ended before it began")
            agent = _Agent(command, environment, folder)
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
                agent.end()


class _Agent:
    def __init__(self, command: Sequence[str], environment: Mapping[str, str], folder: Path) -> None:
        pipe = subprocess.PIPE
        try:
            self._warden = subprocess.Popen(
                command,
                stdin=pipe,
                stdout=pipe,
                stderr=pipe,
                cwd=folder,
                env=dict(environment),
                start_new_session=True,  # Ctrl-C reaches only the run, which then ends its agents
            )
        except OSError as error:
            raise SandboxError(
                f"an agent's warden cannot be started: {error}", fix="see the limits of ulimit"
            ) from error

    def end(self) -> None:
        """Let the warden kill everything; may be called twice, and from other threads."""
        assert self._warden.stdin is not None
        self._warden.send_signal(signal.SIGCONT)  # the agent may have stopped it
        self._warden.stdin.close()

    def wait(self, seconds: float) -> Ended:
        assert self._warden.stdout is not None and self._warden.stderr is not None
        with self._warden:
            is_late = not _is_ready(self._warden.stdout, seconds)
            self.end()
            if not _is_ready(self._warden.stdout, _REPORT_SECONDS):
                self._warden.kill()
            report, errors = self._warden.stdout.read(), self._warden.stderr.read()
        late = f"timed out after {seconds:g} s" if is_late else ""
        try:
            found = json.loads(report)
        except ValueError:
            if text := errors.decode("utf-8", "replace").strip():
                raise SandboxError(f"an agent's sandbox does not start: {shown(text)}") from None
            return Ended(code=None, error=late or "killed together with its warden", is_late=is_late)
        return Ended(code=found["code"], output=found["output"], error=late or found["error"], is_late=is_late)


def _described(code: int) -> str:
    if code > 0:
        return f"exit code {code}"
    known = {each.value: each.name for each in signal.Signals}  # real-time signals have no name
    return f"ended by {known.get(-code, f'signal {-code}')}"


def _is_ready(stream: IO[bytes], seconds: float) -> bool:
    """Wait until a stream can be read or is closed."""
    poll = select.poll()
    poll.register(stream, select.POLLIN)
    return bool(poll.poll(seconds * 1000.0))

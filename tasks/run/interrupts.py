"""Interruption by Ctrl-C and SIGTERM: a run ends within seconds, logs one line, and can be resumed.

The signal raises an exception in the main thread, so that stages close engines, graders and records in order. What does
not end within ``PATIENCE`` seconds, such as a sampling thread, is abandoned: the next start recovers, as after a kill
(:mod:`rlcore.tasks.run.leases`). A second Ctrl-C ends the process immediately.

A terminal sends Ctrl-C to all processes that it started, including the embedded Prefect server. Without a server, each
report of a task's end would be retried for minutes. The server is therefore started out of reach of that signal.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import psutil

from rlcore.errors import ServiceError, shown

PATIENCE = 3.5  # seconds
_GRACE_SECONDS = 0.5
# A run uses no blocks, and to register them the server would import every installed collection: seconds for Kubernetes.
_NO_BLOCKS = {
    "PREFECT_SERVER_REGISTER_BLOCKS_ON_START": "false",
    "PREFECT_SERVER_MEMOIZE_BLOCK_AUTO_REGISTRATION": "false",
}
_SHOW_CURSOR = "\x1b[?25h"  # the live view hides it


class Interruption(KeyboardInterrupt):
    """SIGINT or SIGTERM inside :func:`interruptible`. ``code`` is the exit code that shells expect."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.code = 128 + number


@dataclass
class _State:
    """State of the process: whether the command can be resumed, running stages with work folders, the interruption."""

    resumes: bool = False
    stages: list[tuple[str, Path]] = field(default_factory=list)
    interruption: Interruption | None = None
    is_logged: bool = False


_state = _State()  # signals belong to the process, and so does this state


@contextmanager
def interruptible() -> Iterator[None]:
    """Let SIGINT and SIGTERM end the block as :class:`Interruption`; the same command resumes it later.

    No effect outside the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _state.stages.clear()
    _state.resumes, _state.interruption, _state.is_logged = True, None, False
    try:
        with own_signals():
            yield
    finally:
        _state.resumes = _state.interruption is not None


def is_interrupted() -> bool:
    """Return True if Ctrl-C or SIGTERM has interrupted this process."""
    return _state.interruption is not None


@contextmanager
def own_signals() -> Iterator[None]:
    """Handle signals as in :func:`interruptible`, if it was entered: Prefect installs its own handler around a flow."""
    if threading.current_thread() is not threading.main_thread() or not _state.resumes:
        yield
        return
    before = {number: signal.signal(number, _interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        if _state.interruption is None:  # otherwise a second signal must still end the process immediately
            for number, handler in before.items():
                signal.signal(number, handler)


@contextmanager
def track_stage(stage: str, work: Path) -> Iterator[None]:
    """Record the stage that runs in the block and its work folder, also for the message of an interruption."""
    _state.stages.append((stage, work))
    try:
        yield
    except Exception:
        _state.stages.pop()
        raise
    _state.stages.pop()


def interrupt_message() -> str:
    """Return the message of an interrupted command."""
    if not _state.resumes:
        return "interrupted"
    if not _state.stages:
        return "interrupted; the same command resumes unfinished stages"
    stage, work = _state.stages[-1]
    done = [int(path.name.removeprefix("step-")) for path in (work / "checkpoints").glob("step-*[0-9]")]
    place = f"iteration {max(done) + 1} of {stage}" if done else f"the beginning of {stage}"
    return f"interrupted; the same command resumes from {place}"


def end_interrupted(error: KeyboardInterrupt) -> int:
    """Print :func:`interrupt_message`; end the process for an :class:`Interruption`, else return the exit code.

    Child processes are terminated, and killed after a moment: the embedded server would wait for connections that no
    process closes any more.
    """
    if isinstance(error, Interruption):
        _leave(error.code)
    _log_interruption()
    return 128 + signal.SIGINT


def _log_interruption() -> None:
    if not _state.is_logged:
        _state.is_logged = True
        sys.stderr.write((f"\n{_SHOW_CURSOR}" if sys.stderr.isatty() else "") + interrupt_message() + "\n")


def start_prefect_server() -> None:
    """Start the embedded server with SIGINT blocked, which children inherit, unless ``PREFECT_API_URL`` names one.

    If it does not start, the flow run tries once more and reports the error.
    Raises:
        ServiceError: the server that ``PREFECT_API_URL`` names does not answer, or refuses.
    """
    from prefect.settings import PREFECT_API_URL

    if url := PREFECT_API_URL.value():
        _require_answer(url)
        return
    from prefect.server.api.server import SubprocessASGIServer

    os.environ |= _NO_BLOCKS
    starter = threading.Thread(target=_with_sigint_blocked, args=(SubprocessASGIServer(),), daemon=True)
    starter.start()
    starter.join()


def _require_answer(url: str) -> None:
    from httpx import HTTPError
    from prefect.client.orchestration import get_client

    try:
        with get_client(sync_client=True) as client:
            client.api_version()
    except (HTTPError, RuntimeError) as error:  # the client wraps some of its errors
        raise ServiceError(
            f"no answer from Prefect's server: {shown(str(error) or type(error).__name__, max_chars=120)}",
            where=f"PREFECT_API_URL={url}",
            fix="start it (make services) and source its clients.env, or unset the variable: then it is embedded",
        ) from error


def _with_sigint_blocked(server: Any) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # blocked in this thread alone
    try:
        server.start()
    except RuntimeError as error:
        logging.getLogger(__name__).warning("%s", error)


def _interrupt(number: int, _: FrameType | None) -> None:
    if _state.interruption is not None:
        _leave(_state.interruption.code)
    _state.interruption = Interruption(number)
    logging.disable(logging.CRITICAL)  # otherwise each task would log its own end
    deadline = threading.Timer(PATIENCE, _leave, [_state.interruption.code])
    deadline.daemon = True
    deadline.start()
    raise _state.interruption


def _leave(code: int) -> NoReturn:
    _log_interruption()
    children = psutil.Process().children()
    for child in children:
        child.terminate()
    for child in psutil.wait_procs(children, timeout=_GRACE_SECONDS)[1]:
        child.kill()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

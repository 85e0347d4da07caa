"""Processes of the services, found by a mark in their environment: no pid file can be lost or stale."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess

import psutil

from infra.services.layout import MARK, Layout

logger = logging.getLogger("services")

_PATIENCE = 15.0  # seconds between terminating a process and killing it


def end_flow_runs(layout: Layout, *, worker: subprocess.Popen[bytes] | None) -> None:
    """End the worker and its runs while the servers are up.

    An interrupted run reports that to the server. The next start resumes it, even if it could not report.
    """
    if worker is None:
        return
    try:
        runs = psutil.Process(worker.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return
    worker.kill()  # SIGTERM would make it wait for its runs
    _end(runs)


def stop_orphans(layout: Layout) -> None:
    """Stop the processes of a killed supervisor, the database last."""
    _end([process for process in psutil.process_iter() if _is_marked(process, layout)])
    _end(_database(layout), first=signal.SIGINT)
    for path in layout.root.glob("*.pid"):
        path.unlink()


def _end(processes: list[psutil.Process], *, first: signal.Signals = signal.SIGTERM) -> None:
    for process in processes:
        _send(process, first)
    _, stubborn = psutil.wait_procs(processes, timeout=_PATIENCE)
    for process in stubborn:
        _send(process, signal.SIGKILL)
    psutil.wait_procs(stubborn, timeout=_PATIENCE)
    for process in processes:
        logger.info("stopped process %d", process.pid)


def _send(process: psutil.Process, number: signal.Signals) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(number)


def _is_marked(process: psutil.Process, layout: Layout) -> bool:
    if process.pid in (os.getpid(), os.getppid()):
        return False
    try:
        return bool(process.environ().get(MARK) == str(layout.root))
    except psutil.Error:  # it has ended, or belongs to another user
        return False


def _database(layout: Layout) -> list[psutil.Process]:
    """Return the database's process. PostgreSQL overwrites its environment but stores its process id."""
    try:
        number = int((layout.cluster / "postmaster.pid").read_text(encoding="utf-8").splitlines()[0])
        process = psutil.Process(number)
        return [process] if str(layout.cluster) in process.cmdline() else []
    except (OSError, ValueError, IndexError, psutil.Error):
        return []

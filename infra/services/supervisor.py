"""Supervisor: starts the services in order, restarts those that die, and ends all on a signal.

Processes of a killed supervisor are found by a mark in their environment: no pid file can be lost or stale.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import psutil

from infra.services import postgres
from infra.services.layout import MARK, Layout, environment
from infra.services.provision import is_configured
from infra.services.table import SERVICES, WORKER, Service
from rlcore.tasks.store.locks import file_lock

logger = logging.getLogger("services")

_TICK = 0.5  # seconds between two polls
_CALM = 60.0  # seconds after which a service's earlier deaths are forgotten
_LONGEST_WAIT = 30.0  # seconds before a service that keeps dying is restarted
_PATIENCE, _GRACE = 20.0, 15.0  # seconds between terminating a service, and another process, and killing it
MAX_BYTES = 20 * 2**20
KEPT = 4  # rotated files of each log
_ROTATED_DAYS, _REMOVED_DAYS = 7.0, 30.0
_DAY = 86_400.0


class ServiceProcess:
    """Service with its process and the earliest time of its next start."""

    def __init__(self, service: Service, layout: Layout) -> None:
        self.service, self.layout = service, layout
        self.process: subprocess.Popen[bytes] | None = None
        self._deaths, self._started, self._not_before = 0, 0.0, 0.0

    def poll(self) -> None:
        """Notice a death; start the service when it is due and its dependencies are ready.

        The worker waits for the deployments of ``up``: it would start queued runs with those of before.
        """
        if self.process is not None and self.process.poll() is not None:
            self._note_death(self.process.returncode)
        needed = [each for each in SERVICES if each.name in self.service.needs]
        is_due = self.process is None and time.monotonic() >= self._not_before
        is_due = is_due and all(each.is_ready(self.layout) for each in needed)
        if is_due and (self.service.name != WORKER or is_configured(self.layout)):
            self._start()

    def end(self) -> None:
        if self.process is None:
            return
        self.process.send_signal(self.service.end)
        try:
            self.process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._pid_file.unlink(missing_ok=True)
        logger.info("%s has ended", self.service.name)

    @property
    def _pid_file(self) -> Path:
        return self.layout.root / f"{self.service.name}.pid"

    def _note_death(self, status: int) -> None:
        is_calm = time.monotonic() - self._started > _CALM
        self._deaths = 1 if is_calm else self._deaths + 1
        wait = min(_LONGEST_WAIT, 2.0 ** (self._deaths - 1))
        logger.warning("%s ended with status %d; restart in %.0f s", self.service.name, status, wait)
        self.process, self._not_before = None, time.monotonic() + wait
        self._pid_file.unlink(missing_ok=True)

    def _start(self) -> None:
        with self.layout.log(self.service.name).open("ab") as file:
            self.process = subprocess.Popen(
                self.service.command(self.layout),
                env=environment(self.layout, self.service.name),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd="/" if self.service.name == "postgres" else None,
                start_new_session=True,  # Ctrl-C at the terminal must not reach it
                **self.service.identity(),
            )
        self._started = time.monotonic()
        self._pid_file.write_text(f"{self.process.pid}\n", encoding="utf-8")
        logger.info("%s runs as process %d", self.service.name, self.process.pid)


def supervise(layout: Layout) -> None:
    """Keep the services up until SIGTERM or Ctrl-C, then end them and all runs that they started."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    with file_lock(layout.root / "supervisor.lock", wait=False) as alone:
        if not alone:
            logger.info("another supervisor keeps %s", layout.root)
            return
        stop_orphans(layout)
        (layout.root / "supervisor.pid").write_text(f"{os.getpid()}\n", encoding="utf-8")
        keepers = [ServiceProcess(service, layout) for service in SERVICES]
        with _end_signals() as signals:
            _keep(keepers, layout, signals)
        end_flow_runs(keepers[-1].process)
        for keeper in reversed(keepers):
            keeper.end()
        stop_orphans(layout)


def _keep(keepers: list[ServiceProcess], layout: Layout, signals: list[int]) -> None:
    database, logs = keepers[0], [layout.log(name) for name in ("supervisor", *(each.name for each in SERVICES))]
    began = (layout.root / "passwords.json").stat().st_mtime
    while not signals and not postgres.is_ready(layout):
        database.poll()
        time.sleep(_TICK)
    if not signals:
        postgres.make_databases(layout)
    while not signals:
        for keeper in keepers:
            keeper.poll()
        for log in logs:
            rotate(log, began=began)
        time.sleep(_TICK)


@contextlib.contextmanager
def _end_signals() -> Iterator[list[int]]:
    signals: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        signals.append(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, note)
    yield signals


def rotate(log: Path, *, began: float) -> None:
    """Copy a log that is too long, or has lines of more than a week, to ``.1`` and empty it; ``.1`` becomes ``.2`` …

    A service holds its file open, so the file stays; lines between copy and emptying are lost. ``began``: time of the
    first lines, if the log was never rotated.
    """
    if not log.exists():
        return
    old = [log.with_name(f"{log.name}.{number}") for number in range(1, KEPT + 1)]
    for each in old:
        if each.exists() and time.time() - each.stat().st_mtime > _REMOVED_DAYS * _DAY:
            each.unlink()
    emptied = old[0].stat().st_mtime if old[0].exists() else began
    size = log.stat().st_size
    if size > MAX_BYTES or (size and time.time() - emptied > _ROTATED_DAYS * _DAY):
        for newer, older in zip(old[-2::-1], old[:0:-1], strict=True):
            if newer.exists():
                newer.replace(older)
        shutil.copyfile(log, old[0])
        os.truncate(log, 0)


def end_flow_runs(worker: subprocess.Popen[bytes] | None) -> None:
    """End the worker and its runs while the servers are up.

    An interrupted run reports that; the next start resumes it in any case.
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
    _, stubborn = psutil.wait_procs(processes, timeout=_GRACE)
    for process in stubborn:
        _send(process, signal.SIGKILL)
    psutil.wait_procs(stubborn, timeout=_GRACE)
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
    """Return the database's process: PostgreSQL overwrites its environment but stores its id."""
    try:
        number = int((layout.cluster / "postmaster.pid").read_text(encoding="utf-8").splitlines()[0])
        process = psutil.Process(number)
        return [process] if str(layout.cluster) in process.cmdline() else []
    except (OSError, ValueError, IndexError, psutil.Error):
        return []

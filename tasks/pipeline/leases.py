"""Finds runs whose process died, by their leases, and marks them as ended in MLflow and Prefect.

After SIGKILL or a power cut both show a run as RUNNING for ever, and the embedded Prefect server stays alive. So each
pipeline run holds a lease: a locked file in the home. The next start takes over the leases whose lock the kernel has
released. Process ids in a lease are for people: an id alone proves nothing.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from uuid import UUID

import psutil

from tasks.home.locks import file_lock, locked_file
from tasks.home.settings import Home, engine_name
from tasks.tracking import runs as tracking

_SERVER = "prefect.server.api.server:create_app"
_LAUNCHER = "RLCORE_LAUNCHER"
_PATIENCE = 5.0  # seconds between asking a server to end and killing it


@dataclass(frozen=True, kw_only=True)
class Lease:
    """Which process runs what. ``flow_run_id`` is empty and ``attempt`` 0 under the inline engine."""

    host: str
    pid: int
    mlflow_run_id: str
    flow_run_id: str
    attempt: int


@contextmanager
def hold_lease(home: Home, *, mlflow_run_id: str, flow_run_id: str = "", attempt: int = 0) -> Iterator[None]:
    """Hold a lease while a pipeline runs; the kernel lets go of it when the process dies."""
    lease = Lease(
        host=socket.gethostname(),
        pid=os.getpid(),
        mlflow_run_id=mlflow_run_id,
        flow_run_id=flow_run_id,
        attempt=attempt,
    )
    with locked_file(home.leases / f"{uuid.uuid4().hex}.json", json.dumps(asdict(lease))):
        yield


def mark_launcher() -> None:
    """Put this process's id into the environment of what it starts, for :func:`end_orphaned_servers`."""
    os.environ[_LAUNCHER] = str(os.getpid())


def heal(home: Home) -> tuple[str, ...]:
    """End in MLflow and Prefect what dead processes have left running; one line for each thing that was done.

    The inline engine leaves leases of Prefect flow runs to the next run under Prefect, which has its API at hand.
    """
    done: list[str] = []
    with ExitStack() as stack:
        dead: list[Lease] = []
        alive: list[Lease] = []
        for path in sorted(home.leases.glob("*.json")):
            seen = _read(path)
            if seen is None or (seen.flow_run_id and engine_name() == "inline"):
                continue
            free = stack.enter_context(file_lock(path, wait=False))
            lease = _read(path)  # again: it may have ended in good order between the two
            if lease is not None:
                (dead if free else alive).append(lease)
        for lease in dead:
            done += _end(lease, alive, home)
    return (*done, *_remove_unfinished(home))


def end_orphaned_servers(home: Home) -> tuple[str, ...]:
    """End the embedded Prefect servers of this home whose launcher is dead; one line for each.

    A server inherits its launcher's id in its environment, so there is no pid file that could be lost or stale.
    """
    orphans = [process for process in psutil.process_iter() if _is_orphan(process, home)]
    for process in orphans:
        process.terminate()
    _, stubborn = psutil.wait_procs(orphans, timeout=_PATIENCE)
    for process in stubborn:
        process.kill()
    return tuple(f"ended the Prefect server {process.pid} that a dead process had left" for process in orphans)


def crash_flow_run(flow_run_id: str, *, attempt: int, reason: str) -> bool:
    """Mark a Prefect flow run as crashed if Prefect still shows this attempt as running; returns whether it did.

    A run that has gone on elsewhere in the meantime, as a later attempt, is left alone.
    """
    from prefect.client.orchestration import get_client
    from prefect.exceptions import ObjectNotFound
    from prefect.states import Crashed

    with get_client(sync_client=True) as client:
        try:
            run = client.read_flow_run(UUID(flow_run_id))
        except ObjectNotFound:  # its database was thrown away
            return False
        state = run.state
        if run.run_count != attempt or state is None or not (state.is_running() or state.is_pending()):
            return False
        client.set_flow_run_state(run.id, Crashed(message=reason), force=True)
        return True


def _end(lease: Lease, alive: list[Lease], home: Home) -> list[str]:
    who = f"process {lease.pid} on {lease.host} died"
    done = []
    if lease.mlflow_run_id not in {other.mlflow_run_id for other in alive}:
        count = tracking.open_tracker(home).kill_runs(lease.mlflow_run_id)
        done += [f"{who}: MLflow run {lease.mlflow_run_id} marked KILLED ({count} with its stages)"] if count else []
    if lease.flow_run_id and lease.flow_run_id not in {other.flow_run_id for other in alive}:
        marked = crash_flow_run(lease.flow_run_id, attempt=lease.attempt, reason=who)
        done += [f"{who}: Prefect flow run {lease.flow_run_id} marked CRASHED"] if marked else []
    return done


def _read(path: Path) -> Lease | None:
    try:
        return Lease(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):  # ended just now, or made by another version
        return None


def _remove_unfinished(home: Home) -> list[str]:
    """Remove the outputs of stages that were killed; their work folders stay, for the resume."""
    done = []
    for path in sorted(home.work.glob("*.output")):
        with file_lock(path.with_suffix(".lock"), wait=False) as free:
            if free and path.exists():
                shutil.rmtree(path)
                done.append(f"removed the unfinished output of stage {path.stem[:12]}")
    return done


def _is_orphan(process: psutil.Process, home: Home) -> bool:
    try:
        if _SERVER not in process.cmdline():
            return False
        environment = process.environ()
        launcher = int(environment.get(_LAUNCHER, "0"))
        # The server is its launcher's own child until that dies; a reused id at worst spares an orphan.
        is_left = process.ppid() != launcher and not psutil.pid_exists(launcher)
    except psutil.Error:  # it has ended, or belongs to somebody else
        return False
    return launcher > 0 and is_left and environment.get("RLCORE_HOME") == str(home.root)

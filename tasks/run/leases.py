"""Leases: find runs whose process died, and mark them as ended in MLflow and Prefect.

After SIGKILL or a power cut both show a run as RUNNING for ever, and the embedded Prefect server stays alive. Each
pipeline run therefore holds a lease: a locked file in the state directory. The next start takes over leases whose lock
the kernel has released. Process ids in a lease are informative only: they prove nothing.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import socket
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from uuid import UUID

import psutil

from rlcore.tasks.store.locks import file_lock, is_held, locked_file
from rlcore.tasks.store.settings import Home, engine_name
from rlcore.tasks.store.storage import read_json, write_json
from rlcore.tasks.tracking import runs as tracking

logger = logging.getLogger(__name__)
_SERVER = "prefect.server.api.server:create_app"
_LAUNCHER = "RLCORE_LAUNCHER"
LEASE_TAG = "lease"  # tag of an MLflow run
_UNSWEPT = "unswept"  # marker file: a process died while others lived, so its partial files may remain
# Temporary files of storage, rlcore.models.saving, pipeline.pages and locks, artifacts, MLflow.
HALF_WRITTEN = (".*.tmp", ".tmp-*", ".*.new", ".damaged-*", ".artifact.uploading.*")
_PATIENCE = 5.0  # seconds between terminating a server and killing it


@dataclass(frozen=True, kw_only=True)
class Lease:
    """Process of a run. ``flow_run_id`` is empty and ``attempt`` 0 under the inline engine."""

    host: str
    pid: int
    experiment: str
    flow_run_id: str
    attempt: int


@contextmanager
def startup_lock(home: Home) -> Iterator[None]:
    """Recover from dead processes, then let this process start in the block while no other process does.

    A process that writes in the state directory takes its lease here. Files without a living lease are therefore
    orphaned.
    """
    with file_lock(home.leases / "starting.lock"):
        for line in recover_dead_runs(home):
            logger.warning("%s", line)
        yield


@contextmanager
def hold_lease(
    home: Home,
    *,
    experiment: str,
    flow_run_id: str = "",
    attempt: int = 0,
    is_over: Callable[[str], bool] = lambda _: True,
) -> Iterator[str]:
    """Hold a lease while a pipeline runs and yield its name. The kernel releases it when the process dies.

    MLflow runs carry its name as the tag ``lease`` from the start. If ``is_over`` returns False for the name, MLflow
    still shows a run as running: the lease stays, and the next start ends that run.
    """
    name = uuid.uuid4().hex
    lease = Lease(
        host=socket.gethostname(), pid=os.getpid(), experiment=experiment, flow_run_id=flow_run_id, attempt=attempt
    )
    with locked_file(home.leases / f"{name}.json", json.dumps(asdict(lease)), goes=partial(is_over, name)):
        yield name


@contextmanager
def leased(home: Home, experiment: str) -> Iterator[str]:
    """Hold a lease while a command writes outside a pipeline: the next start removes the partial files of a kill."""
    with ExitStack() as stack:
        with startup_lock(home):
            name = stack.enter_context(hold_lease(home, experiment=experiment))
        yield name


def held_leases(home: Home) -> tuple[Lease, ...]:
    """Return the leases of living processes."""
    return tuple(lease for path in home.leases.glob("*.json") if is_held(path) and (lease := _read(path)))


def mark_launcher() -> None:
    """Put this process's id into the environment of its children, for :func:`end_orphaned_servers`."""
    os.environ[_LAUNCHER] = str(os.getpid())


def recover_dead_runs(home: Home) -> tuple[str, ...]:
    """End runs of dead processes in MLflow and Prefect; return one line for each action.

    Partial files are removed if no living process could be writing them. The inline engine leaves flow runs to the next
    run under Prefect, which has its API.
    """
    done: list[str] = []
    with ExitStack() as stack:
        dead: dict[str, Lease | None] = {}
        alive: list[Lease | None] = []
        for path in sorted(home.leases.glob("*.json")):
            free = stack.enter_context(file_lock(path, wait=False, spare=True))
            if path.exists():  # or it has ended in between
                lease = _read(path)
                dead |= {path.stem: lease} if free else {}
                alive += [] if free else [lease]
        for name, lease in dead.items():
            done += _end(name, lease, home) if lease else []
        if engine_name() != "inline":
            done += _crash_flow_runs(home, {lease.flow_run_id for lease in alive if lease})
        unswept = home.leases / _UNSWEPT
        if dead or any(home.leases.glob(".*.new")):  # a kill before a lease had its name
            unswept.touch()
        if not alive and unswept.exists():
            remove_partial_files(home)
            unswept.unlink()
    return (*done, *_remove_unfinished(home))


def remove_partial_files(home: Home) -> None:
    """Remove partial files, which begin with a dot or are unused locks. No process may be writing."""
    stages = [
        each for each in home.work.glob("[!.]*") if each.is_dir() and not (each / "leases").exists()
    ]  # an inner state directory does not exist
    written = (home.root / "reports", home.root / "budgets", *stages)
    folders = (home.cache, home.pages, home.leases, home.artifacts, home.mlartifacts, *written)
    for remains in [path for folder in folders for pattern in HALF_WRITTEN for path in folder.rglob(pattern)]:
        if remains.is_dir():
            shutil.rmtree(remains, ignore_errors=True)
        else:
            remains.unlink(missing_ok=True)
    for remains in home.root.glob(".*.new"):
        remains.unlink(missing_ok=True)
    for lock in (*home.work.glob("*.lock"), *home.root.glob("*.lock")):
        with file_lock(lock, wait=False):
            pass  # removed with its file


def end_orphaned_servers(home: Home) -> tuple[str, ...]:
    """End the embedded Prefect servers of this state directory whose launcher is dead; return one line for each.

    A server inherits its launcher's id in its environment, so no pid file can be lost or stale.
    """
    orphans = [process for process in psutil.process_iter() if _is_orphan(process, home)]
    for process in orphans:
        process.terminate()
    _, stubborn = psutil.wait_procs(orphans, timeout=_PATIENCE)
    for process in stubborn:
        process.kill()
    return tuple(f"ended the Prefect server {process.pid} that a dead process had left" for process in orphans)


def crash_flow_run(flow_run_id: str, *, attempt: int, reason: str) -> bool:
    """Mark a flow run as crashed if Prefect still shows this attempt as running; return True if it did.

    A run that another process has resumed meanwhile, as a later attempt, is unchanged.
    """
    from prefect.client.orchestration import get_client
    from prefect.exceptions import ObjectNotFound
    from prefect.states import Crashed

    with get_client(sync_client=True) as client:
        try:
            run = client.read_flow_run(UUID(flow_run_id))
        except ObjectNotFound:  # its database was deleted
            return False
        state = run.state
        if run.run_count != attempt or state is None or not (state.is_running() or state.is_pending()):
            return False
        client.set_flow_run_state(run.id, Crashed(message=reason), force=True)
        return True


def _end(name: str, lease: Lease, home: Home) -> list[str]:
    who = f"process {lease.pid} on {lease.host} died"
    tracker, done = tracking.open_tracker(home), []
    for run in tracker.find_runs(lease.experiment, LEASE_TAG, name):
        count = tracker.kill_runs(run)
        done += [f"{who}: MLflow run {run} marked KILLED ({count} with its stages)"] if count else []
    if lease.flow_run_id:
        write_json(
            {"flow_run_id": lease.flow_run_id, "attempt": lease.attempt, "who": who}, home.leases / f"{name}.flow"
        )
    return done


def _crash_flow_runs(home: Home, alive: set[str]) -> Iterator[str]:
    for path in sorted(home.leases.glob("*.flow")):
        flow = read_json(path)
        run, attempt, who = flow["flow_run_id"], flow["attempt"], flow["who"]
        if run not in alive and crash_flow_run(run, attempt=attempt, reason=who):
            yield f"{who}: Prefect flow run {run} marked CRASHED"
        path.unlink(missing_ok=True)


def _read(path: Path) -> Lease | None:
    try:
        return Lease(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):  # just ended, or written by another version
        return None


def _remove_unfinished(home: Home) -> list[str]:
    """Remove the outputs of killed stages. Their work folders stay for the resume."""
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
        # The server is its launcher's child until that dies. A reused id at worst spares an orphan.
        is_left = process.ppid() != launcher and not psutil.pid_exists(launcher)
    except psutil.Error:  # it has ended, or belongs to another user
        return False
    return launcher > 0 and is_left and environment.get("RLCORE_HOME") == str(home.root)

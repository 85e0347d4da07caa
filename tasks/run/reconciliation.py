"""Reconciliation: correct Prefect's records of a work pool's runs by the processes that live.

After SIGKILL, a power cut or hours without a server, Prefect's records are wrong and stay so. A run lives while its
lease is held (``leases``), or while the process that a worker started for it exists. :func:`watch` checks immediately
and then every few seconds, next to the worker of this machine (``infra/worker.py``).
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import psutil

from rlcore.errors import shown
from rlcore.tasks.run.events import deliver, put
from rlcore.tasks.run.leases import held_leases
from rlcore.tasks.run.prefect_bridge import run_page
from rlcore.tasks.store.settings import Home

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import FlowRun, State


logger = logging.getLogger(__name__)

FAILED, CRASHED, MISSED = "rlcore.run.failed", "rlcore.run.crashed", "rlcore.schedule.missed"
_RECENT = timedelta(days=1)  # before which an end is not told any more
_SETTLED = timedelta(seconds=30)  # within which a crashed run is found to live, or is queued again
HEAL = "heal"  # tag of runs that resume after a crash
CRASHES = 3  # a run resumes after as many crashes; a fourth has a cause that a restart does not remove
LOOK_SECONDS = 10.0
SETTLED_SECONDS = 20.0  # a worker starts a run's process, or records its end, within this time
_SUBMITTED_SECONDS = 600.0  # within which a worker of another kind records where it has started a run
_FORGOTTEN = timedelta(days=7)  # earlier crashes are left to the user
_PROCESS = "process"  # kind of worker whose runs are processes of its machine
_ID = "PREFECT__FLOW_RUN_ID"  # in the environment of a run's process and its children
_ENGINES = ("prefect.engine", "prefect.runner._workspace_supervisor")  # command that a worker starts

Correction = Literal["", "resumes", "has crashed", "runs", "is cancelled"]
_STATES: Mapping[Correction, tuple[str, str | None]] = {  # constructors of Prefect's states, and messages
    "runs": ("Running", "Its process lives."),
    "is cancelled": ("Cancelled", None),
    "has crashed": ("Crashed", "Its process died."),
    "resumes": ("AwaitingRetry", "Its process died; it resumes from the cache and its newest checkpoint."),
}


@dataclass(frozen=True, kw_only=True)
class Record:
    """Prefect's record of a run: ``count``: number of starts; ``seconds``: time in this state.

    ``ours``: the worker of this machine took it, so its process is here or does not exist.
    """

    state: str
    count: int
    heals: bool
    ours: bool
    seconds: float


def correction_of(record: Record, *, lives: bool) -> Correction:
    """Return the state that the record should have; empty if it is correct or may still become so."""
    if record.seconds < SETTLED_SECONDS and (lives or record.state != "CRASHED"):
        return ""
    if record.state == "CANCELLING":  # after a server was unreachable, Prefect's worker misses its end
        return "is cancelled" if record.ours else ""
    if lives:
        return "runs" if record.state == "CRASHED" else ""
    if record.state == "CRASHED":
        # A run that crashed before it began (count 0) cannot be loaded.
        is_due = record.heals and 1 <= record.count <= CRASHES and record.seconds < _FORGOTTEN.total_seconds()
        return "resumes" if is_due else ""
    if not record.ours:
        return ""
    return "resumes" if record.heals and record.count <= CRASHES else "has crashed"


def watch(home: Home, *, pool: str, worker: str) -> NoReturn:
    """Reconcile, and tell the team, for ever. A failed pass is followed by the next."""
    from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

    started, known = datetime.now(UTC), set[str]()
    with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}):  # otherwise a pass could take minutes
        while True:
            records = partial(look, home, pool=pool, worker=worker, started=started)
            lines = [*_lines_of(records), *_lines_of(partial(deliver, home))]
            for line in lines:
                if line not in known:  # what stays wrong is said once
                    logger.warning("%s", line)
            known = {*lines}
            time.sleep(LOOK_SECONDS)


def look(home: Home, *, pool: str, worker: str, started: datetime) -> list[str]:
    """Make one pass over the server's records; return its lines."""
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        return [
            *_lines_of(partial(reconcile, client, home, pool=pool, worker=worker, started=started)),
            *_lines_of(partial(report_ended, client, home, pool)),
            *_lines_of(partial(report_missed, client, home, pool)),
        ]


def _lines_of(part: partial[Any]) -> list[str]:
    try:
        return list(part())
    except Exception as error:  # noqa: BLE001 - whatever it is, later dead runs must be found
        return [f"{part.func.__name__} failed: {type(error).__name__}: {shown(error)}"]


def reconcile(client: SyncPrefectClient, home: Home, *, pool: str, worker: str, started: datetime) -> Iterator[str]:
    """Correct Prefect's records of the runs of a pool; return one line per correction.

    ``worker`` began at ``started``: an earlier worker of its name left the runs that it took before.
    """
    unsettled = list(_unsettled(client, pool))
    living = living_runs(home) if unsettled else {}  # a run that has ended since reported its end before

    def correct(run: FlowRun) -> Iterator[str]:
        correction = correction_of(_record(run, worker, started), lives=str(run.id) in living)
        now = client.read_flow_run(run.id).state if correction else None
        if now is None or run.state is None or now.id != run.state.id:
            return
        _set_state(client, run, correction)
        if correction == "is cancelled" and (process := living.get(str(run.id))):
            with suppress(psutil.Error):
                process.kill()  # after the state, so that this is no crash
        yield f"flow run {run.name} ({run.id}) was {run.state.name}, and {correction}"
        if correction == "resumes":
            text = "its process died; it resumes from the cache and its newest checkpoint"
            yield tell_run(client, home, run, CRASHED, text, key=now.id, time=datetime.now(UTC))

    yield from each_run(unsettled, correct)


def _set_state(client: SyncPrefectClient, run: FlowRun, correction: Correction) -> None:
    """Set a run's state. One that cannot be queued again has crashed: it would keep its place in the queue for ever."""
    try:
        client.set_flow_run_state(run.id, _state(correction), force=True)
    except Exception:
        if correction != "resumes":
            raise
        client.set_flow_run_state(run.id, _state("has crashed"), force=True)
        raise


def living_runs(home: Home) -> Mapping[str, psutil.Process | None]:
    """Return the flow runs with a held lease or a process on this machine, with the process if there is one."""
    leased: dict[str, psutil.Process | None] = {lease.flow_run_id: None for lease in held_leases(home)}
    return leased | {run: process for process in psutil.process_iter() if (run := _flow_run_of(process))}


def _flow_run_of(process: psutil.Process) -> str:
    """Return the id of the run that this process executes; empty for others, also for children of a run.

    A worker makes the run's process the leader of a session. Forks have its command line but are no leader.
    """
    try:
        if not any(engine in process.cmdline() for engine in _ENGINES) or os.getsid(process.pid) != process.pid:
            return ""
        return str(process.environ().get(_ID, ""))
    except (psutil.Error, OSError):  # it has ended, or belongs to another user
        return ""


def _unsettled(client: SyncPrefectClient, pool: str) -> Iterator[FlowRun]:
    for types in (["PENDING", "RUNNING", "CANCELLING"], ["CRASHED"]):
        yield from _runs(client, pool, {"state": {"type": {"any_": types}}})


def _runs(client: SyncPrefectClient, pool: str, wanted: Mapping[str, Any]) -> list[FlowRun]:
    from prefect.client.schemas.filters import FlowRunFilter, WorkPoolFilter
    from prefect.client.schemas.sorting import FlowRunSort

    return client.read_flow_runs(
        flow_run_filter=FlowRunFilter.model_validate(wanted),
        work_pool_filter=WorkPoolFilter.model_validate({"name": {"any_": [pool]}}),
        sort=FlowRunSort.END_TIME_DESC,
    )


def _record(run: FlowRun, worker: str, started: datetime) -> Record:
    assert run.state is not None  # the server was queried for this state
    taken_by = run.labels.get("prefect.worker.name")
    # A crashed run may be in its last seconds; if it is dead, there is nothing to wait for.
    is_left = taken_by == worker and run.state.timestamp < started and not run.state.is_crashed()
    seconds = (datetime.now(UTC) - run.state.timestamp).total_seconds()
    if run.labels.get("prefect.worker.type", _PROCESS) == _PROCESS:
        is_ours = taken_by in (None, worker)
    else:  # Prefect's own worker handles a Job, unless it died before creating one
        is_ours = run.infrastructure_pid is None and run.state.is_pending() and seconds > _SUBMITTED_SECONDS
    return Record(
        state=run.state.type.value,
        count=run.run_count,
        heals=HEAL in run.tags,
        ours=is_ours,
        seconds=max(seconds, SETTLED_SECONDS) if is_left else seconds,
    )


def _state(correction: Correction) -> State[Any]:
    from prefect import states

    name, message = _STATES[correction]
    made: State[Any] = getattr(states, name)(message=message)
    return made


def each_run(runs: Iterable[FlowRun], handle: Callable[[FlowRun], Iterable[str]]) -> Iterator[str]:
    """Yield the lines of handling each run: one that cannot be handled is a line, and the others follow."""
    for run in runs:
        try:
            yield from handle(run)
        except Exception as error:  # noqa: BLE001 - whatever one run has, the others must not wait for it
            yield f"flow run {run.name} ({run.id}) cannot be handled: {type(error).__name__}: {shown(error)}"


def report_ended(client: SyncPrefectClient, home: Home, pool: str) -> Iterator[str]:
    """Tell the team of runs that failed or crashed since yesterday."""
    since = {"after_": datetime.now(UTC) - _RECENT}
    found = _runs(client, pool, {"state": {"type": {"any_": ["FAILED", "CRASHED"]}}, "end_time": since})
    yield from each_run(reversed(found), lambda run: _tell_ended(client, home, run))


def report_missed(client: SyncPrefectClient, home: Home, pool: str) -> Iterator[str]:
    """Tell the team of scheduled runs that did not start before the next one was due."""
    found = _runs(client, pool, {"state": {"name": {"any_": ["Late"]}}})
    yield from each_run(missed_runs(found), lambda run: _tell_missed(client, home, run))


def missed_runs(late: Iterable[FlowRun]) -> list[FlowRun]:
    """Return those of late scheduled runs that are not the newest of their deployment, which is due now."""
    newest_first = sorted(
        (each for each in late if each.auto_scheduled and each.expected_start_time),
        key=lambda each: str(each.expected_start_time),
        reverse=True,
    )
    seen, found = set(), []
    for run in newest_first:
        if run.deployment_id in seen:
            found.append(run)
        seen.add(run.deployment_id)
    return found[::-1]


def tell_run(
    client: SyncPrefectClient, home: Home, run: FlowRun, event: str, text: str, *, key: object, time: datetime
) -> str:
    """Put a message about a run into the outbox; return it as a line of the log."""
    deployment = client.read_deployment(run.deployment_id).name if run.deployment_id else "no deployment"
    about = f"{run.name} ({deployment})"
    url, moment = run_page(run.id), time.isoformat()
    put(home, key=str(key), event=event, about=about, text=text, run=run.name, url=url, time=moment)
    return f"flow run {about}: {event} {shown(text)}"


def _tell_ended(client: SyncPrefectClient, home: Home, run: FlowRun) -> Iterator[str]:
    state = run.state
    assert state is not None  # the server was queried for it
    if state.is_failed() or datetime.now(UTC) - state.timestamp > _SETTLED:
        event = FAILED if state.is_failed() else CRASHED
        text = (state.message or "no message").removeprefix("Flow run encountered an exception: ")
        yield tell_run(client, home, run, event, text, key=state.id, time=state.timestamp)


def _tell_missed(client: SyncPrefectClient, home: Home, run: FlowRun) -> Iterator[str]:
    due = run.expected_start_time
    assert due is not None  # or it would not be late
    text = f"the run of {due:%Y-%m-%d %H:%M} UTC did not start before the next one was due"
    yield tell_run(client, home, run, MISSED, text, key=run.id, time=due)

"""Holds what Prefect says of a work pool's runs against what is true: which of their processes live.

After SIGKILL, a power cut or hours without a server, Prefect's records are wrong, and nothing in it mends them. A run
lives while its lease is held (``leases``), or while the process that a worker has started for it is
there. :func:`watch` looks at once and then every few seconds, beside the worker of this machine (``infra/worker.py``).
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import psutil

from rlcore.tasks.pipeline.leases import held_leases
from rlcore.tasks.store.settings import Home

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import FlowRun, State

logger = logging.getLogger(__name__)

HEAL = "heal"  # the tag of runs that go on after a crash
CRASHES = 3  # after which a run goes on; a fourth crash has a cause that a restart does not mend
LOOK_SECONDS = 10.0
SETTLED_SECONDS = 20.0  # a worker starts a run's process, or notes its end, within this time
_SUBMITTED_SECONDS = 600.0  # within which a worker of another kind says where it has started a run
_FORGOTTEN = timedelta(days=7)  # a crash of longer ago is left to people
_PROCESS = "process"  # the kind of worker whose runs are processes of its machine
_ID = "PREFECT__FLOW_RUN_ID"  # in the environment of a run's process, and of all that it starts
_ENGINES = ("prefect.engine", "prefect.runner._workspace_supervisor")  # what a worker starts

Verdict = Literal["", "goes on", "has crashed", "runs", "is cancelled"]


@dataclass(frozen=True, kw_only=True)
class Record:
    """Prefect's record of a run: ``count``: number of starts; ``seconds``: time in this state.

    ``ours``: the worker of this machine took it, so its process is here or nowhere.
    """

    state: str
    count: int
    heals: bool
    ours: bool
    seconds: float


def judge(record: Record, *, lives: bool) -> Verdict:
    """Return the state that the record should have; empty if it is right, or may still become right by itself."""
    if record.seconds < SETTLED_SECONDS and (lives or record.state != "CRASHED"):
        return ""
    if record.state == "CANCELLING":  # after a server was away, Prefect's worker no longer hears of it
        return "is cancelled" if record.ours else ""
    if lives:
        return "runs" if record.state == "CRASHED" else ""
    if record.state == "CRASHED":
        # A run that crashed before it began (count 0) cannot even be loaded.
        is_due = record.heals and 1 <= record.count <= CRASHES and record.seconds < _FORGOTTEN.total_seconds()
        return "goes on" if is_due else ""
    if not record.ours:
        return ""
    return "goes on" if record.heals and record.count <= CRASHES else "has crashed"


def watch(home: Home, *, pool: str, worker: str) -> NoReturn:
    """Reconcile for ever. After a look that failed, for want of a server or else, comes the next."""
    from prefect.client.orchestration import get_client
    from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

    started = datetime.now(UTC)
    with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}):  # else a look could take minutes
        while True:
            try:
                with get_client(sync_client=True) as client:
                    for line in reconcile(client, home, pool=pool, worker=worker, started=started):
                        logger.warning("%s", line)
            except Exception as error:  # noqa: BLE001 - whatever it is, runs that die later have to be found
                logger.warning("the runs were not looked at: %s: %s", type(error).__name__, error)
            time.sleep(LOOK_SECONDS)


def reconcile(client: SyncPrefectClient, home: Home, *, pool: str, worker: str, started: datetime) -> Iterator[str]:
    """Put right what Prefect says of the runs of a pool; one line for each that was wrong.

    ``worker`` began at ``started``: what it has taken before that, an earlier one of its name has left.
    """
    unsettled = list(_unsettled(client, pool))
    living = living_runs(home) if unsettled else {}  # one that has ended since has told its end before
    for run in unsettled:
        verdict = judge(_record(run, worker, started), lives=str(run.id) in living)
        now = client.read_flow_run(run.id).state if verdict else None
        if now is not None and run.state is not None and now.id == run.state.id:
            client.set_flow_run_state(run.id, _state(verdict), force=True)
            if verdict == "is cancelled" and (process := living.get(str(run.id))):
                with suppress(psutil.Error):
                    process.kill()  # after the state, so that this is no crash
            yield f"flow run {run.name} ({run.id}) was {run.state.name}, and {verdict}"


def living_runs(home: Home) -> Mapping[str, psutil.Process | None]:
    """The flow runs whose lease is held or whose process is on this machine, with the process if it is."""
    leased: dict[str, psutil.Process | None] = {lease.flow_run_id: None for lease in held_leases(home)}
    return leased | {run: process for process in psutil.process_iter() if (run := _flow_run_of(process))}


def _flow_run_of(process: psutil.Process) -> str:
    """The id of the run whose own process this is; empty for any other, also for what a run has started.

    A worker makes the run's process the leader of a session. What it forks has its command line, but is no leader.
    """
    try:
        if not any(engine in process.cmdline() for engine in _ENGINES) or os.getsid(process.pid) != process.pid:
            return ""
        return str(process.environ().get(_ID, ""))
    except (psutil.Error, OSError):  # it has ended, or belongs to somebody else
        return ""


def _unsettled(client: SyncPrefectClient, pool: str) -> Iterator[FlowRun]:
    """The runs of a pool that have begun and not ended, and those that crashed last."""
    from prefect.client.schemas import filters
    from prefect.client.schemas.objects import StateType
    from prefect.client.schemas.sorting import FlowRunSort

    pools = filters.WorkPoolFilter(name=filters.WorkPoolFilterName(any_=[pool]))
    for types in ([StateType.PENDING, StateType.RUNNING, StateType.CANCELLING], [StateType.CRASHED]):
        state = filters.FlowRunFilterState(type=filters.FlowRunFilterStateType(any_=types))
        yield from client.read_flow_runs(
            flow_run_filter=filters.FlowRunFilter(state=state), work_pool_filter=pools, sort=FlowRunSort.END_TIME_DESC
        )


def _record(run: FlowRun, worker: str, started: datetime) -> Record:
    assert run.state is not None  # of its state the server was asked
    taken_by = run.labels.get("prefect.worker.name")
    # One that crashed may be in its last seconds; if it is dead, nothing waits for it to settle.
    is_left = taken_by == worker and run.state.timestamp < started and not run.state.is_crashed()
    seconds = (datetime.now(UTC) - run.state.timestamp).total_seconds()
    if run.labels.get("prefect.worker.type", _PROCESS) == _PROCESS:
        is_ours = taken_by in (None, worker)
    else:  # a Job is looked after by Prefect's own worker, unless that died before it had made one
        is_ours = run.infrastructure_pid is None and run.state.is_pending() and seconds > _SUBMITTED_SECONDS
    return Record(
        state=run.state.type.value,
        count=run.run_count,
        heals=HEAL in run.tags,
        ours=is_ours,
        seconds=max(seconds, SETTLED_SECONDS) if is_left else seconds,
    )


def _state(verdict: Verdict) -> State[Any]:
    from prefect import states

    if verdict == "runs":
        return states.Running(message="Its process lives.")
    if verdict == "is cancelled":
        return states.Cancelled()
    if verdict == "has crashed":
        return states.Crashed(message="Its process died.")
    return states.AwaitingRetry(message="Its process died; it goes on from the cache and its newest checkpoint.")

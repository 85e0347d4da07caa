"""Messages about the runs of a work pool, each told once: failed, crashed, and scheduled ones that did not start.

They are made beside the worker from the server's records, so that they cover every deployment and every way to end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from rlcore.errors import shown
from rlcore.tasks.pipeline.outbox import put
from rlcore.tasks.pipeline.prefect_bridge import run_page
from rlcore.tasks.store.settings import Home

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.filters import WorkPoolFilter
    from prefect.client.schemas.objects import FlowRun

FAILED, CRASHED, MISSED = "rlcore.run.failed", "rlcore.run.crashed", "rlcore.schedule.missed"
_RECENT = timedelta(days=1)  # before which an end is not told any more
_SETTLED = timedelta(seconds=30)  # within which a crashed run is found to live, or is queued again


def each_run(runs: Iterable[FlowRun], handle: Callable[[FlowRun], Iterable[str]]) -> Iterator[str]:
    """Yield the lines of handling each run: one that cannot be handled is a line, and the others follow."""
    for run in runs:
        try:
            yield from handle(run)
        except Exception as error:  # noqa: BLE001 - whatever one run has, the others must not wait for it
            yield f"flow run {run.name} ({run.id}) cannot be handled: {type(error).__name__}: {shown(error)}"


def report_ended(client: SyncPrefectClient, home: Home, pool: str) -> Iterator[str]:
    """Tell the team of runs that failed or crashed since yesterday."""
    from prefect.client.schemas import filters
    from prefect.client.schemas.objects import StateType
    from prefect.client.schemas.sorting import FlowRunSort

    ended = filters.FlowRunFilter(
        state=filters.FlowRunFilterState(
            type=filters.FlowRunFilterStateType(any_=[StateType.FAILED, StateType.CRASHED])
        ),
        end_time=filters.FlowRunFilterEndTime.model_validate({"after_": datetime.now(UTC) - _RECENT}),
    )
    found = client.read_flow_runs(
        flow_run_filter=ended, work_pool_filter=_in_pool(pool), sort=FlowRunSort.END_TIME_DESC
    )
    yield from each_run(reversed(found), lambda run: _tell_ended(client, home, run))


def report_missed(client: SyncPrefectClient, home: Home, pool: str) -> Iterator[str]:
    """Tell the team of scheduled runs that did not start before the next one was due."""
    from prefect.client.schemas import filters

    late = filters.FlowRunFilterState(name=filters.FlowRunFilterStateName(any_=["Late"]))
    found = client.read_flow_runs(flow_run_filter=filters.FlowRunFilter(state=late), work_pool_filter=_in_pool(pool))
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
    put(
        home,
        key=str(key),
        event=event,
        about=about,
        text=text,
        run=run.name,
        url=run_page(run.id),
        time=time.isoformat(),
    )
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


def _in_pool(pool: str) -> WorkPoolFilter:
    from prefect.client.schemas import filters

    return filters.WorkPoolFilter(name=filters.WorkPoolFilterName(any_=[pool]))

"""Scheduled runs that did not start before the next one was due, each reported once by an event."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from rlcore.tasks.pipeline.events import emit_missed

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import FlowRun

_REPORTED = "rlcore.missed"  # label of a run, so that another worker, or a restarted one, does not repeat the event


def report_missed(client: SyncPrefectClient, pool: str) -> Iterator[str]:
    """Emit an event for each new missed run of a work pool; return one line per run."""
    from prefect.client.schemas import filters

    late = filters.FlowRunFilterState(name=filters.FlowRunFilterStateName(any_=["Late"]))
    pools = filters.WorkPoolFilter(name=filters.WorkPoolFilterName(any_=[pool]))
    found = client.read_flow_runs(flow_run_filter=filters.FlowRunFilter(state=late), work_pool_filter=pools)
    for run in missed_runs(found):
        deployment = client.read_deployment(run.deployment_id).name if run.deployment_id else ""
        text = f"the run of {run.expected_start_time:%Y-%m-%d %H:%M} UTC did not start before the next one was due"
        client.update_flow_run_labels(run.id, {_REPORTED: "yes"})
        emit_missed(run.name, deployment, text)
        yield f"flow run {run.name} ({run.id}) of the schedule of {deployment}: {text}"


def missed_runs(late: Iterable[FlowRun]) -> list[FlowRun]:
    """Return the unreported ones of late scheduled runs, without the newest of each deployment, which is due now."""
    newest_first = sorted(
        (each for each in late if each.auto_scheduled and each.expected_start_time),
        key=lambda each: str(each.expected_start_time),
        reverse=True,
    )
    seen, found = set(), []
    for run in newest_first:
        if run.deployment_id in seen and _REPORTED not in run.labels:
            found.append(run)
        seen.add(run.deployment_id)
    return found[::-1]

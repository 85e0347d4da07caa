"""MLflow run of a pipeline: one for all attempts at the same command, with a lease that precedes it."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

from rlcore.config import to_dict
from rlcore.tasks.pipeline.budget import unlimited
from rlcore.tasks.pipeline.cache_keys import key_of
from rlcore.tasks.pipeline.interrupts import own_signals
from rlcore.tasks.pipeline.leases import LEASE_TAG, hold_lease, startup_lock
from rlcore.tasks.pipeline.prefect_bridge import FlowRun, current_flow_run, report_link
from rlcore.tasks.presets.run import RunConfig
from rlcore.tasks.store.code_hash import code_version
from rlcore.tasks.store.settings import Home
from rlcore.tasks.tracking.runs import RunTracker, Tracker

logger = logging.getLogger(__name__)


@contextmanager
def open_pipeline(
    home: Home, tracker: Tracker, experiment: str, config: RunConfig, targets: Collection[str]
) -> Iterator[RunTracker]:
    """Open the MLflow run of a pipeline after recovering from dead processes.

    At the end none of its runs is shown as running. If MLflow is unreachable or the disk full, the next start updates
    it.
    """
    flow_run = current_flow_run()
    flow_run_id, attempt = (flow_run.flow_run_id, flow_run.attempt) if flow_run else ("", 0)
    runs: list[RunTracker] = []
    with ExitStack() as stack:
        with startup_lock(home):
            lease = stack.enter_context(
                hold_lease(
                    home,
                    experiment=experiment,
                    flow_run_id=flow_run_id,
                    attempt=attempt,
                    is_over=lambda name: _is_over(tracker, experiment, name, runs),
                )
            )
            runs.append(open_pipeline_run(tracker, experiment, config, targets, lease=lease, flow_run=flow_run))
        stack.enter_context(own_signals())
        yield stack.enter_context(runs[0])


def _is_over(tracker: Tracker, experiment: str, lease: str, runs: Sequence[RunTracker]) -> bool:
    """End what MLflow still shows as running; return True on success. ``runs``: the opened runs, if any."""
    if not all(run.is_over for run in runs):
        return False
    try:
        for run in tracker.find_runs(experiment, LEASE_TAG, lease):
            tracker.kill_runs(run)
    except Exception as error:  # noqa: BLE001 - the error that ended the run is the one to raise
        logger.warning("the end of this run could not be logged to MLflow: %.200s; the next start logs it", error)
        return False
    return True


def is_unfinished(home: Home, tracker: Tracker, experiment: str, config: RunConfig, targets: Collection[str]) -> bool:
    """Return True if the last attempt at this pipeline was killed or failed, so that later work may be missing.

    It first recovers from dead processes.
    """
    with startup_lock(home):
        pass
    find = partial(tracker.find_runs, experiment, "pipeline", _digest(config, targets))
    return bool({*find()[:1]} & {*find(status="= 'KILLED'"), *find(status="= 'FAILED'")})


def open_pipeline_run(
    tracker: Tracker,
    experiment: str,
    config: RunConfig,
    targets: Collection[str],
    *,
    lease: str,
    flow_run: FlowRun | None = None,
) -> RunTracker:
    """Open the pipeline's MLflow run: the one of a killed attempt, or a new one.

    Equal preset values and targets are the same pipeline, whatever its budget. A later attempt of a Prefect flow run
    continues the run of the first attempt, however that ended.
    """
    pipeline = _digest(config, targets)
    attempt_of = f"{flow_run.flow_run_id}/{pipeline}" if flow_run else ""
    known = tracker.find_runs(experiment, "attempt_of", attempt_of) if flow_run and flow_run.attempt > 1 else []
    known = known or tracker.find_runs(experiment, "pipeline", pipeline, status="= 'KILLED'")
    tags = {"preset": config.name, "code": code_version(), "pipeline": pipeline, LEASE_TAG: lease}
    if flow_run:
        tags |= {
            "prefect.flow_run_id": flow_run.flow_run_id,
            "prefect.flow_run_url": flow_run.url,
            "attempt_of": attempt_of,
        }
    parent = tracker.reopen_run(known[0], tags=tags) if known else None
    if parent is None:
        flow = flow_run.name.split()[0] if flow_run else ""  # its other words name the preset's file
        parent = tracker.start_run(experiment, f"{config.name} {flow}".rstrip(), tags=tags)
    parent.log_params(to_dict(config))
    if parent.url:
        report_link("mlflow run", parent.url)
    return parent


def _digest(config: RunConfig, targets: Collection[str]) -> str:
    return key_of({"config": to_dict(unlimited(config)), "targets": sorted(targets)})[:16]

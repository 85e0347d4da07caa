"""The MLflow run of a pipeline: one for all attempts at the same command, with a lease from before its first moment."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager

from rlcore.config import to_dict
from tasks.home.code_hash import code_version
from tasks.home.settings import Home
from tasks.pipeline.bridge import FlowRun, current_flow_run, report_link
from tasks.pipeline.keys import key_of
from tasks.pipeline.leases import LEASE_TAG, hold_lease, starting
from tasks.preset.run import RunConfig
from tasks.tracking.runs import RunTracker, Tracker


@contextmanager
def opened(
    home: Home, tracker: Tracker, experiment: str, config: RunConfig, targets: Collection[str]
) -> Iterator[RunTracker]:
    """The MLflow run of a pipeline while it runs; before that, what dead processes have left is healed."""
    flow_run = current_flow_run()
    flow_run_id, attempt = (flow_run.flow_run_id, flow_run.attempt) if flow_run else ("", 0)
    with ExitStack() as stack:
        with starting(home):
            lease = stack.enter_context(
                hold_lease(home, experiment=experiment, flow_run_id=flow_run_id, attempt=attempt)
            )
            parent = open_pipeline_run(tracker, experiment, config, targets, lease=lease, flow_run=flow_run)
        yield stack.enter_context(parent)


def is_unfinished(home: Home, tracker: Tracker, experiment: str, config: RunConfig, targets: Collection[str]) -> bool:
    """Whether an attempt at this very pipeline was killed, so that pages may be missing whose results are there.

    What dead processes have left is healed first.
    """
    with starting(home):
        pass
    return bool(tracker.find_runs(experiment, "pipeline", _digest(config, targets), status="= 'KILLED'"))


def open_pipeline_run(
    tracker: Tracker,
    experiment: str,
    config: RunConfig,
    targets: Collection[str],
    *,
    lease: str,
    flow_run: FlowRun | None = None,
) -> RunTracker:
    """The pipeline's MLflow run: that of an attempt that was killed, or a new one.

    The same values of the preset and the same targets are the same pipeline. A later attempt of a Prefect flow run goes
    on with the first attempt's, however that ended.
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
        parent = tracker.start_run(experiment, flow_run.name if flow_run else config.name, tags=tags)
    parent.log_params(to_dict(config))
    if parent.url:
        report_link("mlflow run", parent.url)
    return parent


def _digest(config: RunConfig, targets: Collection[str]) -> str:
    return key_of({"config": to_dict(config), "targets": sorted(targets)})[:16]

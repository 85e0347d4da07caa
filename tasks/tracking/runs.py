"""Runs, metrics, datasets and views in MLflow; ``registry.py`` has the registry of models.

MLflow takes seconds to import, so each function that needs it imports it. All calls use run ids: MLflow's "active run"
belongs to one thread, and tasks may run in others. Metrics and tables are written in the background, in order.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import quote

from rlcore.tasks.store.locks import file_lock
from rlcore.tasks.store.settings import Home, is_continued
from rlcore.tasks.store.storage import file_sha256, flatten
from rlcore.tasks.tracking.database import database_rows, make_database, require_made, rewrite_artifact_paths
from rlcore.tasks.tracking.mlflow_model import log_files
from rlcore.tasks.tracking.retry import ignore_existing, none_if_missing, patient_client, retry_while_unavailable

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Experiment, Metric, Run

    from rlcore.loop.curves import Tools

logger = logging.getLogger(__name__)
MAX_WAITING = 32  # jobs; more block the caller, so that a slow server cannot fill the memory
Status = Literal["FINISHED", "FAILED", "KILLED"]
_TABLES_TAG = "mlflow.loggedArtifacts"  # a list, in a tag of at most 8000 characters, which the interface reads
PARENT_TAG = "mlflow.parentRunId"  # the tag by which MLflow's interface nests runs
_ERROR = "error"  # tag with the reason of an end
_ACTIVE = "active"  # lifecycle of what is not in MLflow's trash
_MAX_PARAM, _MAX_DIGEST = 500, 36  # MLflow's limits in characters
_PARAMS_PER_CALL, _METRICS_PER_CALL, _MAX_TABLES = 100, 1000, 100  # and in entries
_WRITE_SECONDS = 5.0  # between two writes of metrics, of 30 ms each; MLflow's own queue would only log errors
# Columns of the list of runs: a named view in a tag of the experiment, in the form of the menu *Views* of MLflow 3.17.
# Without one the list shows no metric.
_VIEW = "results"
_VIEW_TAG = f"mlflow.sharedViewState.{_VIEW}"
_MAX_COLUMNS = 50  # MLflow's limit for a tag is 5000 characters


def open_tracker(home: Home) -> Tracker:
    """Open MLflow's server if ``MLFLOW_TRACKING_URI`` names one, else the database of the state directory."""
    uri = os.environ.setdefault("MLFLOW_TRACKING_URI", home.tracking_uri)
    require_made(home)
    from mlflow import MlflowClient

    with file_lock(home.root / "mlflow.lock"):  # two processes that create the tables concurrently fail
        if uri == home.tracking_uri:
            make_database(home)
        # The client opens the database immediately, and would create missing tables.
        client = patient_client(retry_while_unavailable(MlflowClient, tracking_uri=uri, registry_uri=uri))
        client.search_experiments(max_results=1)
        if uri == home.tracking_uri:
            retry_while_unavailable(rewrite_artifact_paths, home)
    return Tracker(client, uri, None if uri.startswith("http") else home.mlartifacts.as_uri())


class Tracker:
    """MLflow's server or database, for one state directory."""

    def __init__(self, client: MlflowClient, uri: str, artifact_root: str | None) -> None:
        self.client, self.uri = client, uri
        self._artifact_root = artifact_root  # None: the server decides

    def start_run(self, experiment: str, name: str, *, tags: Mapping[str, str], parent: str = "") -> RunTracker:
        nested = {PARENT_TAG: parent} if parent else {}
        own = self._experiment(experiment)[0]
        if own != experiment and not parent:
            logger.warning("the MLflow experiment %r was deleted; this run is in %r", experiment, own)
        run = self.client.create_run(self._experiment_id(own), run_name=name, tags={**tags, **nested})
        return RunTracker(self.client, run)

    def reopen_run(self, run_id: str, *, tags: Mapping[str, str] | None = None, parent: str = "") -> RunTracker | None:
        """Continue an interrupted run, or return None if MLflow no longer has it.

        The tag ``restarts`` counts the continuations, and ``error`` is removed. Metrics of steps that the run already
        has are dropped: MLflow would keep both.
        """
        run = self.get_run(run_id)
        if run is None:
            return None
        nested = {PARENT_TAG: parent} if parent else {}
        again = RunTracker(self.client, run, resumed=True)
        # The lease comes first: a kill between the two leaves no running run without a lease.
        again.set_tags({"restarts": str(1 + int(run.data.tags.get("restarts", 0))), **(tags or {}), **nested})
        self.client.update_run(run_id, status="RUNNING")
        if _ERROR in run.data.tags:
            self.client.delete_tag(run_id, _ERROR)
        return again

    def find_run(self, run_id: str) -> RunTracker | None:
        """Return a run without restarting it, to add to; None if MLflow has none of that id, or it was deleted."""
        run = self.get_run(run_id)
        return RunTracker(self.client, run) if run else None

    def find_runs(self, experiment: str, tag: str, value: str, *, status: str = "") -> list[str]:
        """Return the ids of an experiment's runs with that tag and a status such as ``= 'KILLED'``, newest first."""
        known = self._experiment(experiment)[1]
        query = f"tags.`{tag}` = '{value}'" + (f" AND attributes.status {status}" if status else "")
        return [run.info.run_id for run in self.client.search_runs([known.experiment_id], query)] if known else []

    def run_metrics(self, run_id: str) -> Mapping[str, float]:
        """Return the last value of every metric of a run; none if MLflow no longer has it."""
        run = none_if_missing(self.client.get_run, run_id) if run_id else None
        return dict(run.data.metrics) if run else {}

    def kill_runs(self, run_id: str) -> int:
        """Mark a dead pipeline's run and its stages' runs as killed if shown as running; return their number."""
        run = none_if_missing(self.client.get_run, run_id)
        if run is None:
            return 0
        children = self.client.search_runs([run.info.experiment_id], f"tags.`{PARENT_TAG}` = '{run_id}'")
        running = [each.info.run_id for each in (*children, run) if each.info.status == "RUNNING"]
        for each in running:
            self.client.set_terminated(each, "KILLED")
        return len(running)

    def get_run(self, run_id: str) -> Run | None:
        """Return a run; None if there is none, or it or its experiment was deleted."""
        run = none_if_missing(self.client.get_run, run_id) if run_id else None
        return run if run and run.info.lifecycle_stage == _ACTIVE else None

    def _experiment(self, name: str) -> tuple[str, Experiment | None]:
        """Return an experiment and its name: ``name 2`` if a person has deleted the first, whose name stays taken."""
        own = name
        for number in count(2):
            known = self.client.get_experiment_by_name(own)
            if known is None or known.lifecycle_stage == _ACTIVE:
                break
            own = f"{name} {number}"
        return own, known

    def _experiment_id(self, name: str) -> str:
        own, known = self._experiment(name)
        if known is not None:
            return str(known.experiment_id)
        location = f"{self._artifact_root}/{own}" if self._artifact_root else None
        kind = {"mlflow.experimentKind": "custom_model_development"}  # the interface opens on curves, not on traces
        ignore_existing(self.client.create_experiment, own, artifact_location=location, tags=kind)
        return self._experiment_id(own)


class RunTracker:
    """Run of a pipeline or a stage. Use it as a context manager: leaving it ends the run with its status."""

    def __init__(self, client: MlflowClient, run: Run, *, resumed: bool = False) -> None:
        self.client = client
        self.run_id: str = run.info.run_id
        self.experiment_id: str = run.info.experiment_id
        self.known_tags: Mapping[str, str] = run.data.tags  # opening time
        self.began = datetime.fromtimestamp(run.info.start_time / 1000, UTC).isoformat(timespec="milliseconds")
        self.is_over = False  # whether MLflow has recorded its end
        self._resumed = resumed
        self._last_steps: dict[str, int] = {}
        self._writer = BackgroundWriter()
        self._waiting: list[Metric] = []
        self._sent = time.monotonic()
        self.also: Tools | None = None  # other tools that record each step
        self._tables: list[dict[str, str]] | None = None  # those that the interface shows; None: not read yet
        self._told_tables = True  # whether MLflow has recorded all of them

    def __enter__(self) -> RunTracker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is None:
            self.end("FINISHED")
            return
        reason = {_ERROR: f"{type(error).__name__}: {error}"[:5000]}
        status: Status = "KILLED" if is_continued(error) else "FAILED"
        for log_end in (partial(self.set_tags, reason), partial(self.end, status)):
            try:
                log_end()
            except Exception as trouble:  # noqa: BLE001 - the error that ended the run is the one to raise
                logger.warning("the end of run %s could not be logged to MLflow: %.200s", self.run_id, trouble)

    @property
    def url(self) -> str:
        """Run's page, empty if MLflow is a database without a server."""
        base = os.environ.get("MLFLOW_TRACKING_URI", "").rstrip("/")
        return f"{base}/#/experiments/{self.experiment_id}/runs/{self.run_id}" if base.startswith("http") else ""

    def log_params(self, params: Mapping[str, Any]) -> None:
        """Log parameters under dotted names, with up to 500 characters; a reopened run keeps those that it has."""
        from mlflow.entities import Param

        known = self.client.get_run(self.run_id).data.params if self._resumed else {}
        entries = [Param(name, str(x)[:_MAX_PARAM]) for name, x in flatten(params).items() if name not in known]
        for start in range(0, len(entries), _PARAMS_PER_CALL):
            self.client.log_batch(self.run_id, params=entries[start : start + _PARAMS_PER_CALL])

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = 0) -> None:
        """Log numbers at a step, None: after the last one; :meth:`flush` stores them.

        A fast loop's steps are written together, every five seconds. A reopened run drops steps that it already has:
        after a resume the last iterations are repeated. A later call raises the error of a failed write.
        """
        from mlflow.entities import Metric

        at = step or 0
        if self.also is not None:
            self.also.write(metrics, step)
        now = int(time.time() * 1000)
        self._waiting += [Metric(name, float(x), now, at) for name, x in metrics.items() if self._is_new(name, at)]
        if time.monotonic() - self._sent > _WRITE_SECONDS or len(self._waiting) > _METRICS_PER_CALL:
            self._send()

    def log_summary(self, metrics: Mapping[str, float]) -> None:
        """Log the metrics of a finished stage, except those whose curve the run already has."""
        self.flush()
        known = self.client.get_run(self.run_id).data.metrics
        self.log_metrics({name: value for name, value in metrics.items() if name not in known}, step=None)

    def flush(self) -> None:
        """Wait until all metrics and tables are written; no later kill can lose one."""
        self._send()
        self._writer.wait()
        if self.also is not None:
            self.also.flush()

    def set_tags(self, tags: Mapping[str, str]) -> None:
        from mlflow.entities import RunTag

        self.client.log_batch(self.run_id, tags=[RunTag(name, value) for name, value in tags.items()])

    def log_artifact(self, path: Path, folder: str) -> None:
        """Add a file, or all files of a folder, to the run's folder: plots, tables, the rollouts of an iteration."""
        log_files(self.client, self.run_id, path, folder)

    def log_table(self, path: Path, folder: str) -> None:
        """Add a JSON table (``columns``, ``data``) that MLflow's interface shows: the newest hundred of a run.

        The file must stay until :meth:`flush`. MLflow's ``log_table`` would read and rewrite earlier tables.
        """
        self._writer.submit(partial(self.log_artifact, path, folder))
        if self._tables is None:
            known = self.client.get_run(self.run_id).data.tags.get(_TABLES_TAG, "[]") if self._resumed else "[]"
            self._tables = json.loads(known)
        entry = {"path": f"{folder}/{path.name}", "type": "table"}
        self._tables = [*(each for each in self._tables if each != entry), entry][-_MAX_TABLES:]
        self._told_tables = False

    def in_background(self, job: Callable[[], object]) -> None:
        """Queue a job for the background thread; :meth:`flush` waits for it too."""
        self._writer.submit(job)

    def log_dataset(self, path: Path, *, name: str, context: str) -> None:
        """Log a Parquet file as this run's data: with the SHA-256 of its bytes, its columns and row count.

        ``context`` is its use: ``train`` or ``eval``. MLflow truncates a digest; the tag ``sha256`` has all of it.
        """
        import pyarrow.parquet as parquet
        from mlflow.entities import Dataset, DatasetInput, InputTag

        digest = file_sha256(path)
        columns = [{"name": field.name, "type": str(field.type)} for field in parquet.read_schema(path)]
        dataset = Dataset(
            name=name,
            digest=digest[:_MAX_DIGEST],
            source_type="local",
            source=json.dumps({"uri": path.name}),
            schema=json.dumps({"columns": columns}),
            profile=json.dumps({"num_rows": parquet.read_metadata(path).num_rows}),
        )
        tags = [InputTag("mlflow.data.context", context), InputTag("sha256", digest)]
        self.client.log_inputs(self.run_id, [DatasetInput(dataset, tags)])

    def log_model_metrics(self, model_id: str, metrics: Mapping[str, float]) -> None:
        """Log this run's metrics of a logged model: MLflow compares models by these.

        MLflow adds them to the run's curves, so each repeats the last point of its curve with its time, which is not
        stored twice.
        """
        from mlflow.entities import Metric

        entries = []
        for name, value in metrics.items():
            last = self._last_point(name)
            step, moment = (last.step, last.timestamp) if last else (0, int(time.time() * 1000))
            entries.append(Metric(name, float(value), moment, step, model_id=model_id, run_id=self.run_id))
        self.client.log_batch(self.run_id, metrics=entries)

    def end(self, status: Status) -> None:
        """Write what is queued and end the run; if writing fails, the run ends but is not marked as finished."""
        try:
            self.flush()
        except BaseException:
            status = "FAILED" if status == "FINISHED" else status
            raise
        finally:
            self._writer.close()
            self.client.set_terminated(self.run_id, status)
            self.is_over = True

    def _send(self) -> None:
        waiting, self._waiting = self._waiting, []
        for start in range(0, len(waiting), _METRICS_PER_CALL):
            batch = waiting[start : start + _METRICS_PER_CALL]
            self._writer.submit(partial(self.client.log_batch, self.run_id, metrics=batch))
        if not self._told_tables:
            tag = json.dumps(self._tables)
            self._writer.submit(partial(self.client.set_tag, self.run_id, _TABLES_TAG, tag))
            self._told_tables = True
        self._sent = time.monotonic()

    def _is_new(self, name: str, step: int) -> bool:
        if not self._resumed:
            return True
        if name not in self._last_steps:
            self._last_steps[name] = last.step if (last := self._last_point(name)) else -1
        return step > self._last_steps[name]

    def _last_point(self, name: str) -> Metric | None:
        history = none_if_missing(self.client.get_metric_history, self.run_id, name) or ()
        return max(history, key=lambda point: point.step, default=None)


class BackgroundWriter:
    """Run jobs in order while the caller continues.

    After a job fails, the later ones are dropped, so that records have no gap. Each later :meth:`submit` and
    :meth:`wait` raises its error.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="writer")  # starts with the first job
        self._jobs: deque[Future[None]] = deque(maxlen=MAX_WAITING)  # the newest

    def submit(self, job: Callable[[], object]) -> None:
        """Queue ``job``; block while ``MAX_WAITING`` are queued."""
        if len(self._jobs) == MAX_WAITING:
            self._jobs[0].result()
        before = self._jobs[-1] if self._jobs else None
        if before and before.done():
            before.result()
        self._jobs.append(self._thread.submit(_do_after, before, job))

    def wait(self) -> None:
        if self._jobs:
            self._jobs[-1].result()

    def close(self) -> None:
        """Finish the queued jobs and end the thread, even if a job failed."""
        self._thread.shutdown(wait=True)


def _do_after(before: Future[None] | None, job: Callable[[], object]) -> None:
    if before:
        before.result()  # raises its error
    job()


def save_results_view(run: RunTracker, metrics: Sequence[str]) -> None:
    """Show these metrics as columns in the view *Results* of a run's experiment, unless a user changed it."""
    columns = [f"metrics.`{name}`" for name in metrics[:_MAX_COLUMNS]]
    state = json.dumps({"selectedColumns": columns})
    known = json.loads(run.client.get_experiment(run.experiment_id).tags.get(_VIEW_TAG, "{}"))
    if known.get("state") == state or known.get("createdAt") != known.get("updatedAt"):
        return
    now = int(time.time() * 1000)
    view = {"name": "Results", "createdAt": now, "updatedAt": now, "state": state}
    run.client.set_experiment_tag(run.experiment_id, _VIEW_TAG, json.dumps(view))


def results_links(run: RunTracker) -> str:
    """Return Markdown links to the view of a run's experiment, and to a comparison with the others that have one."""
    found = run.client.search_experiments(filter_string=f"tags.`{_VIEW_TAG}` LIKE '%'")
    others = [each.experiment_id for each in found if each.experiment_id != run.experiment_id]
    links = f"[results of this preset]({_page([run.experiment_id])})"
    return f"{links}, [of all presets]({_page([run.experiment_id, *others])})" if others else links


def results_page(home: Home) -> str:
    """Return the page of all presets' results below the address of MLflow; empty if no run of this home has ended."""
    query = (
        "SELECT experiment_id FROM experiment_tags JOIN experiments USING (experiment_id) "
        "WHERE key = ? AND lifecycle_stage = 'active' ORDER BY experiment_id DESC"
    )
    found = [str(number) for (number,) in database_rows(home.root / "mlflow.db", query, _VIEW_TAG)]
    return _page(found) if found else ""


def _page(experiments: Sequence[str]) -> str:
    if len(experiments) == 1:
        return f"#/experiments/{experiments[0]}/runs?viewStateShareKey={_VIEW}"
    ids = quote(json.dumps(experiments, separators=(",", ":")))
    return f"#/compare-experiments/s?experiments={ids}&viewStateShareKey={_VIEW}"

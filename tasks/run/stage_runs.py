"""MLflow run and result of a stage across attempts: a kill at any moment duplicates neither.

The MLflow run of a key continues until the key has a result. The result is recorded in the work folder before the store
has it. A kill after the last step thus costs no step again, and the artifact stays the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlcore.errors import StorageError
from rlcore.tasks.keys.cache_keys import whole_config
from rlcore.tasks.keys.earlier_work import MLFLOW_RUN
from rlcore.tasks.presets.run import RunConfig
from rlcore.tasks.run.budget import Meter
from rlcore.tasks.steps.base import StageContext
from rlcore.tasks.store.artifacts import ArtifactRef, ArtifactStore
from rlcore.tasks.store.cache import KeyInputs, StageCache, describe_machine
from rlcore.tasks.store.code_hash import code_version, pins
from rlcore.tasks.store.settings import Home
from rlcore.tasks.store.storage import read_json, write_json
from rlcore.tasks.tracking.runs import RunTracker, Tracker

_RESULT = "result.json"  # in a work folder


@dataclass(frozen=True, kw_only=True)
class PipelineRun:
    """Shared state of the stages of a run: home, store, cache, the pipeline's MLflow run, and the amounts spent."""

    home: Home
    store: ArtifactStore
    cache: StageCache
    tracker: Tracker
    experiment: str
    parent: RunTracker
    meter: Meter


@dataclass(frozen=True, kw_only=True)
class StepOutput:
    """Result of a step: its artifact and summary metrics."""

    ref: ArtifactRef
    metrics: Mapping[str, float]

    def note(self, work: Path) -> None:
        write_json(asdict(self), work / _RESULT)


def noted_result(work: Path) -> StepOutput | None:
    """Return the result that an attempt noted in its work folder before the store had it."""
    try:
        noted = read_json(work / _RESULT)
        return StepOutput(ref=ArtifactRef.from_json(noted["ref"]), metrics=noted["metrics"])
    except (StorageError, KeyError, TypeError):
        return None


def open_stage_run(stage: str, key: str, work: Path, run: PipelineRun) -> RunTracker:
    """Open the stage's MLflow run: the one of an attempt without result, so that its curves continue, or a new one.

    A run shown as running may belong to another state directory on the same server.
    """
    known = work / MLFLOW_RUN
    parent = run.parent.run_id
    begun = [read_json(known)["run_id"]] if known.exists() else []
    begun = begun or run.tracker.find_runs(run.experiment, "stage_key", key, status="= 'KILLED'")
    tracker = run.tracker.reopen_run(begun[0], parent=parent) if begun else None
    if tracker is None:
        tags = {"stage": stage, "stage_key": key, "code": code_version()}
        tracker = run.tracker.start_run(run.experiment, f"{run.experiment} {stage}", tags=tags, parent=parent)
    write_json({"run_id": tracker.run_id}, known)
    run.parent.set_tags({f"stage.{stage}": f"run:{tracker.run_id}"})
    return tracker


def log_cache_hit(stage: str, ref: ArtifactRef, run: PipelineRun) -> None:
    """Record at the pipeline's run that a stage was cached, unless an attempt at this run made it."""
    if run.parent.known_tags.get(f"stage.{stage}") != f"run:{ref.mlflow_run_id}":
        run.parent.set_tags({f"stage.{stage}": f"cached:{ref.mlflow_run_id}"})


def log_result(
    finished: StepOutput, context: StageContext, *, machine: Mapping[str, object], with_packages: bool
) -> None:
    """Log the result to the stage's run, and for a model the installed packages."""
    tracker, ref = context.tracker, finished.ref
    tracker.log_summary(finished.metrics)
    tags = {"sha256": ref.sha256, "artifact": ref.uri, "stage_key": ref.stage_key, "code": code_version()}
    tags |= {"machine": describe_machine(machine)} if machine else {}
    tracker.set_tags(tags)
    if with_packages:
        (context.work / "environment.txt").write_text(pins(), encoding="utf-8")
        tracker.log_artifact(context.work / "environment.txt", "environment")


def parameters(section: Mapping[str, Any]) -> Mapping[str, object]:
    """Return a stage's configuration under names that stages of one kind share, so that MLflow can compare their runs.

    The stage's own settings lose the prefix ``stage``.
    """
    own = section.get("stage")
    others = {name: value for name, value in section.items() if name != "stage"}
    return {**own, **others} if isinstance(own, Mapping) else section


def logged(ingredients: KeyInputs) -> Mapping[str, object]:
    """Return the key inputs of a stage that are parameters of its MLflow run."""
    machine = {name: value for name, value in ingredients["machine"].items() if value}
    found = {**parameters(whole_config(ingredients)), "seed": ingredients["seed"]}
    return found | {"machine": machine} if machine else found


@contextmanager
def open_curves(config: RunConfig, home: Home, stage: str, tracker: RunTracker) -> Iterator[None]:
    """Let the stage's tracker write to the tools, which continue the curves of a killed attempt.

    Raises:
        ConfigError: a tool cannot be used.
    """
    wanted = config.tracking.also
    if not wanted:
        yield
        return
    from rlcore.loop.curves import TOOLS, Tools

    name = f"{stage}-{tracker.run_id[:8]}"
    with ExitStack() as stack:
        opened = (TOOLS[each](home.root / each, project=config.name, run=name) for each in wanted)
        tracker.also = Tools([stack.enter_context(closing(each)) for each in opened])
        try:
            yield
        finally:
            tracker.also = None

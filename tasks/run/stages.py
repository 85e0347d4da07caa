"""Pipeline stages: cached functions from artifacts to one artifact.

A stage writes to a temporary folder, which becomes the artifact on success. Its work folder survives a crash and holds
what a resumed run needs, such as checkpoints. The artifact is stored first, then the cache record; then the work folder
is removed, or becomes the checkpoint that a longer run extends. A crash therefore loses at most the work of one stage.

A kill at any moment duplicates neither the stage's MLflow run nor its result: the run of a key continues until the key
has a result, which is recorded in the work folder before the store has it.
"""

from __future__ import annotations

import dataclasses
import importlib
import logging
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rlcore.errors import RlcoreError, StorageError
from rlcore.progress import begin, end_stage
from rlcore.tasks.drawing.result import Result
from rlcore.tasks.keys.cache_keys import OUTCOME, key_of, whole_config, without_outcome
from rlcore.tasks.keys.earlier_work import (
    MLFLOW_RUN,
    checkpoint_key,
    close_work,
    continued,
    damage,
    find_result,
    find_start,
    other_stop,
    prepare_work,
)
from rlcore.tasks.keys.key_inputs import key_inputs
from rlcore.tasks.keys.machine import known_machine
from rlcore.tasks.keys.shared_results import shared_result
from rlcore.tasks.kinds.kind import Stage
from rlcore.tasks.presets.run import RunConfig
from rlcore.tasks.run.budget import Meter
from rlcore.tasks.run.events import emit_findings, emit_snapshot
from rlcore.tasks.run.interrupts import track_stage
from rlcore.tasks.run.pages import show_refusal
from rlcore.tasks.run.prefect_bridge import stage_logger
from rlcore.tasks.steps.base import StageContext, StageResult
from rlcore.tasks.store.artifacts import ArtifactRef, ArtifactStore
from rlcore.tasks.store.cache import KeyInputs, Record, StageCache, describe_machine, now
from rlcore.tasks.store.code_hash import code_version, pins, pins_digest
from rlcore.tasks.store.locks import file_lock
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


logger = logging.getLogger(__name__)
NO_LEVELS: Mapping[str, float] = MappingProxyType({})


def run_stage(stage: Stage, config: RunConfig, inputs: Mapping[str, ArtifactRef], run: PipelineRun) -> ArtifactRef:
    """Return the stage's artifact, running the stage if it is not cached.

    A file lock, and a claim in the shared store, make concurrent processes compute a result once. Errors of the stage
    propagate; earlier results and the work folder are kept.
    Raises:
        BudgetReachedError: a limit of the preset's budget is reached.
    """
    begin(stage.name, scope="stage")
    ingredients = key_inputs(stage, config, inputs)
    key = key_of(ingredients)
    started = time.perf_counter()
    with file_lock(run.home.work / f"{key}.lock"), shared_result(stage.name, key, run.home) as publish:
        record, note = find_result(stage, stage.sections(config), ingredients, run.cache, run.store)
        if record is not None and (errors := run.store.errors(record.ref)):
            record, note = None, damage(errors)
        if record is not None:
            run.cache.note_use(stage.name, key, config.name)
            close_work(run.home, config.name, stage, key, record.ref)  # left by a killed process
            log_cache_hit(stage.name, record.ref, run)
            publish(record)
            logger.info("%s: cached seconds=%.1f%s", stage.name, time.perf_counter() - started, note and f" ({note})")
            end_stage()
            return record.ref
        if ingredients["machine"] and _machine_differs(stage, config, ingredients):
            return run_stage(stage, config, inputs, run)
        _require_intact(stage, inputs, run.store)
        with run.meter.stops(config.name, stage.name):
            logger.info("%s: start", stage.name)
            start = find_start(stage, config, ingredients, run.home, note=note)
            run.cache.note_use(stage.name, key, config.name)
            if stage.continuation is not None:
                logger.info("%s: %s", stage.name, start.text)
                prepare_work(start, run.home.work / key, ingredients, run.store)
            record = _compute(stage, config, inputs, run, ingredients)
        _write_record(record, stage, config, run)
        publish(record)
    logger.info("%s: done seconds=%.1f", stage.name, record.seconds)
    end_stage()
    return record.ref


def _machine_differs(stage: Stage, config: RunConfig, ingredients: KeyInputs) -> bool:
    """Ask torch, which what is computed needs anyway, if the machine of a key is another than the remembered one."""
    importlib.import_module("torch")
    return dict(ingredients["machine"]) != dict(known_machine(stage.sections(config).hardware).facts)


def _compute(
    stage: Stage, config: RunConfig, inputs: Mapping[str, ArtifactRef], run: PipelineRun, ingredients: KeyInputs
) -> Record:
    key, started = key_of(ingredients), time.perf_counter()
    with (
        _folders(run.home, key) as (folder, work),
        track_stage(stage.name, work),
        open_stage_run(stage.name, key, work, run) as tracker,
        open_curves(config, run.home, stage.name, tracker),
    ):
        context = StageContext(
            stage=stage.name,
            folder=folder,
            work=work,
            inputs={name: run.store.path(inputs[name]) for name in stage.inputs},
            input_refs={name: inputs[name] for name in stage.inputs},
            config=stage.sections(config),
            seed=config.seed,
            stage_key=key,
            checkpoint_key=checkpoint_key(ingredients, stage.continuation, stage.sections(config)),
            tracker=tracker,
            log=stage_logger(logger, stage.name),
            report_progress=run.meter.report_progress,
            run_task=run.meter.run_task,
        )
        tracker.log_params(logged(ingredients))
        _log_continued(work, tracker)
        finished = _recovered(stage, context, run.store)
        if finished is None:
            finished = _run_and_store(stage, config, context, run, ingredients)
        log_result(finished, context, machine=ingredients["machine"], with_packages=bool(stage.registered_as))
    return Record(
        key=finished.ref.stage_key,
        ref=finished.ref,
        ingredients=_with_outcome(ingredients, stage, run.store.path(finished.ref)),
        metrics=finished.metrics,
        code=code_version(),
        environment=pins_digest(),
        created=now(),
        seconds=time.perf_counter() - started,
        files=context.config.files(),
    )


def _log_continued(work: Path, tracker: RunTracker) -> None:
    rows, earlier = continued(work)
    for row in rows:
        metrics = {name: value for name, value in row.items() if name != "iteration"}
        tracker.log_metrics(metrics, step=int(row["iteration"]))
    if earlier:
        tracker.set_tags({"continues": earlier})


def _recovered(stage: Stage, context: StageContext, store: ArtifactStore) -> StepOutput | None:
    found = noted_result(context.work)
    if found is None or store.errors(found.ref) or other_stop(stage, context.config, store.path(found.ref)):
        return None
    return found


def _with_outcome(ingredients: KeyInputs, stage: Stage, folder: Path) -> KeyInputs:
    stop = stage.continuation.recorded(folder)[1] if stage.continuation else None
    return {**ingredients, OUTCOME: stop} if stop else ingredients


def _require_intact(stage: Stage, inputs: Mapping[str, ArtifactRef], store: ArtifactStore) -> None:
    """Verify the digests of dataset inputs. Models are verified when they are loaded."""
    for name in stage.inputs:
        ref = inputs[name]
        if ref.kind == "dataset" and (errors := store.errors(ref)):
            raise StorageError(
                f"the rows of {name} are not those of their digest any more: {errors[0]}",
                where=str(store.root / ref.uri),
                fix="rerun the command, which recreates it",
            )


def _write_record(record: Record, stage: Stage, config: RunConfig, run: PipelineRun) -> None:
    is_new = record.ref.sha256 not in {each.ref.sha256 for each in run.cache.records(stage.name)}
    run.cache.write(stage.name, record)
    close_work(run.home, config.name, stage, key_of(without_outcome(record.ingredients)), record.ref)
    if is_new and stage.artifact == "dataset":
        emit_snapshot(config, stage.name, record.ref)
    emit_findings(config.name, stage.name, run.store.path(record.ref))


def _run_step(stage: Stage, config: RunConfig, context: StageContext) -> StageResult:
    try:
        return stage.run(context)
    except RlcoreError:
        if stage.render_page is not None:
            failed = result_of(stage, config, context.folder, context.inputs)
            show_refusal(stage.render_page, failed, context.work)
        raise


def result_of(
    stage: Stage, config: RunConfig, data: Path, inputs: Mapping[str, Path], levels: Mapping[str, float] = NO_LEVELS
) -> Result:
    """Return the input of the stage's page: its files in ``data``, those of its inputs, and their recorded levels."""
    level = levels.get(stage.name, config.evaluation.confidence)
    return Result(preset=config.name, stage=stage.name, confidence=level, data=data, inputs=inputs, levels=levels)


@contextmanager
def _folders(home: Home, key: str) -> Iterator[tuple[Path, Path]]:
    output, work = home.work / f"{key}.output", home.work / key
    shutil.rmtree(output, ignore_errors=True)  # left by a killed process, whose work folder has what can be resumed
    output.mkdir()
    work.mkdir(exist_ok=True)
    try:
        yield output, work
    finally:
        shutil.rmtree(output, ignore_errors=True)  # already gone if it has become an artifact


def _run_and_store(
    stage: Stage, config: RunConfig, context: StageContext, run: PipelineRun, ingredients: KeyInputs
) -> StepOutput:
    """Run the stage, make curves and amounts durable, note the result, and store it: in this order, for any kill."""
    result = _run_step(stage, config, context)
    context.tracker.flush()
    run.meter.count_stage(context.folder, context.work, result.metrics)
    key = key_of(_with_outcome(ingredients, stage, context.folder))
    ref = run.store.seal(context.folder, kind=stage.artifact, rows=result.rows, contract=result.contract, stage_key=key)
    finished = StepOutput(ref=dataclasses.replace(ref, mlflow_run_id=context.tracker.run_id), metrics=result.metrics)
    finished.note(context.work)
    run.store.place(context.folder, finished.ref)
    return finished

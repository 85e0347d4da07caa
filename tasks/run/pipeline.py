"""Execution of stages in order, within one MLflow run for all attempts at the same command."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

from rlcore.config import to_dict
from rlcore.metrics import is_machine_dependent
from rlcore.tasks.keys.cache_keys import key_of, level_of
from rlcore.tasks.keys.machine import known_machine
from rlcore.tasks.keys.plan import order_stages, recorded_refs
from rlcore.tasks.kinds.kind import IMPORT, Stage
from rlcore.tasks.presets.run import RunConfig
from rlcore.tasks.run.budget import metered, unlimited
from rlcore.tasks.run.interrupts import own_signals
from rlcore.tasks.run.leases import LEASE_TAG, hold_lease, startup_lock
from rlcore.tasks.run.pages import is_drawn, page_folder, show_pages
from rlcore.tasks.run.prefect_bridge import FlowRun, current_flow_run, report_link, task
from rlcore.tasks.run.retrain import recipe_of
from rlcore.tasks.run.stages import PipelineRun, result_of, run_stage
from rlcore.tasks.steps.base import MODEL
from rlcore.tasks.store.artifacts import MANIFEST, ArtifactRef, ArtifactStore
from rlcore.tasks.store.cache import Record, StageCache, describe_machine
from rlcore.tasks.store.code_hash import code_version
from rlcore.tasks.store.locks import file_lock, scratch_folder
from rlcore.tasks.store.settings import Home
from rlcore.tasks.store.shared import open_shared_store
from rlcore.tasks.tracking.lineage import note_past, read_records
from rlcore.tasks.tracking.mlflow_model import PAST, Package, files_below
from rlcore.tasks.tracking.model_card import refresh_cards, write_card
from rlcore.tasks.tracking.registry import find_by_sha256, register_model
from rlcore.tasks.tracking.runs import RunTracker, Tracker, open_tracker

logger = logging.getLogger(__name__)
Report = Callable[..., object]
"""Report of a finished run: takes the run, the preset, the artifacts, and ``started`` in the format of records."""


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
            is_over = partial(_is_over, tracker, experiment, runs)
            lease = stack.enter_context(
                hold_lease(home, experiment=experiment, flow_run_id=flow_run_id, attempt=attempt, is_over=is_over)
            )
            runs.append(open_pipeline_run(tracker, experiment, config, targets, lease=lease, flow_run=flow_run))
        stack.enter_context(own_signals())
        yield stack.enter_context(runs[0])


def _is_over(tracker: Tracker, experiment: str, runs: Sequence[RunTracker], lease: str) -> bool:
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


def run_pipeline(
    stages: Sequence[Stage],
    config: RunConfig,
    targets: Collection[str],
    *,
    home: Home,
    experiment: str,
    report: Report | None = None,
) -> Mapping[str, ArtifactRef]:
    """Run the targets' stages in order and write ``report``; return the artifacts by stage name.

    Under Prefect each stage is a task of the flow run. MLflow gets a run for the pipeline, with a child for each
    computed stage.
    Raises:
        ConfigError: a stage needs more memory than the GPU has.
        StorageError: the shared store cannot be used.
        BudgetReachedError: a limit of the preset's budget is reached.
    """
    if shared := open_shared_store():
        shared.require_usable()
    ordered, machine = order_stages(stages, targets), _machine(config)
    tracker = open_tracker(home)
    refs: dict[str, ArtifactRef] = {}
    with open_pipeline(home, tracker, experiment, config, targets) as parent, metered(home, config) as meter:
        parent.set_tags({"machine": machine})
        run = PipelineRun(
            home=home,
            store=ArtifactStore(home.root),
            cache=StageCache(home.cache),
            tracker=tracker,
            experiment=experiment,
            parent=parent,
            meter=meter,
        )
        for stage in ordered:
            refs[stage.name] = _run_stage_task(stage, config, {name: refs[name] for name in stage.inputs}, run)
            if stage.name == IMPORT:
                done = recorded_refs(stages, config, targets, home=home)
                _show_memory(config, home, refs, [each.name for each in ordered if each.name not in done])
        complete_cards(ordered, refs, preset=config.name, run=run)
        if report is not None:
            report(run, config, refs, started=parent.began)
    return refs


def _machine(config: RunConfig) -> str:
    found = known_machine(config.hardware)
    machine = describe_machine(found.facts)
    logger.info("machine: %s", machine)
    if found.warning:
        logger.warning("%s", found.warning)
    return machine


def _show_memory(config: RunConfig, home: Home, refs: Mapping[str, ArtifactRef], stages: Sequence[str]) -> None:
    if not stages:
        return
    from rlcore.tasks.preflight.model_checks import model_facts
    from rlcore.tasks.preflight.sizes import memory_lines

    for line in memory_lines(config, model_facts(config, home, refs).size, stages):
        logger.info("%s", line)


@task(name="stage", run_name="{stage.name}")
def _run_stage_task(
    stage: Stage, config: RunConfig, inputs: Mapping[str, ArtifactRef], run: PipelineRun
) -> ArtifactRef:
    ref = run_stage(stage, config, inputs, run)
    with file_lock(run.home.work / f"publish-{ref.sha256}.lock"):
        _publish(stage, config, ref, inputs, run)
    return ref


def _publish(
    stage: Stage, config: RunConfig, ref: ArtifactRef, inputs: Mapping[str, ArtifactRef], run: PipelineRun
) -> None:
    if stage.registered_as:
        register(stage, ref, inputs, preset=config.name, run=run)
    folder = page_folder(run.home, config.name, stage.name, ref)
    if stage.render_page is None:
        return
    folders = {name: run.store.path(each) for name, each in inputs.items()}
    levels = _levels({**inputs, stage.name: ref}, run.cache)
    result = result_of(stage, config, run.store.path(ref), folders, levels)
    if not is_drawn(stage.render_page, result, folder):
        show_pages(stage.render_page, result, folder, run.parent)


def _levels(refs: Mapping[str, ArtifactRef], cache: StageCache) -> dict[str, float]:
    records = {name: cache.find(name, ref.stage_key) for name, ref in refs.items()}
    return {name: level for name, each in records.items() if each and (level := level_of(each.ingredients))}


def register(
    stage: Stage, ref: ArtifactRef, inputs: Mapping[str, ArtifactRef], *, preset: str, run: PipelineRun
) -> None:
    """Register the stage's model as a version of ``<preset>-<stage.registered_as>``, unless it is registered already.

    Tags and card of the version come from the stage's record, whichever run registers it.
    """
    name = f"{preset}-{stage.registered_as}"
    record = run.cache.find(stage.name, ref.stage_key)
    if record is None or find_by_sha256(run.tracker, name, ref.sha256) is not None:
        return
    made_by = run.tracker.find_run(ref.mlflow_run_id)
    if made_by is None:
        logger.warning("%s: its MLflow run is not there or was deleted; this run publishes its model", stage.name)
        made_by = run.parent
    tags = _tags(record, inputs) | {"preset": preset}
    records = read_records(run.home)
    card = write_card(run.home, records, record, name=name, version=None, tags=tags)
    folder = run.store.path(ref)
    # Seconds of a killed attempt are in the run's curves already; they are no facts of a model.
    metrics = {metric: value for metric, value in record.metrics.items() if not is_machine_dependent(metric)}
    recipe = recipe_of(run.home, record.ingredients)
    with scratch_folder(run.home.work) as temporary:
        tags |= {PAST: note_past(run.home, records, record, temporary / PAST, recipe=recipe)}
        beside = {MANIFEST: folder / MANIFEST} | files_below(temporary)
        package = Package(checkpoint=folder / MODEL, card=card, facts=tags, beside=beside)
        version = register_model(made_by, package, name=name, tags=tags, metrics=metrics)
    refresh_cards(run.home, run.tracker, [version])


def complete_cards(stages: Iterable[Stage], refs: Mapping[str, ArtifactRef], *, preset: str, run: PipelineRun) -> None:
    """Add results that followed the registration to the cards of the stages' models."""
    made = [(f"{preset}-{stage.registered_as}", refs[stage.name].sha256) for stage in stages if stage.registered_as]
    found = [find_by_sha256(run.tracker, name, sha256) for name, sha256 in made]
    refresh_cards(run.home, run.tracker, [version for version in found if version is not None])


def _tags(record: Record, inputs: Mapping[str, ArtifactRef]) -> dict[str, str]:
    ref, ingredients = record.ref, record.ingredients
    machine = describe_machine(ingredients["machine"])
    return {
        "sha256": ref.sha256,
        "artifact": ref.uri,
        "stage_key": ref.stage_key,
        "code": record.code,
        "environment": record.environment,
        "versions": ",".join(f"{name}=={version}" for name, version in ingredients["versions"].items() if version),
        "data": _named({name: each for name, each in inputs.items() if each.kind == "dataset"}),
        "parents": _named({name: each for name, each in inputs.items() if each.kind != "dataset"}),
        **({"machine": machine} if machine else {}),
    }


def _named(refs: Mapping[str, ArtifactRef]) -> str:
    return ",".join(f"{name}:{ref.sha256}" for name, ref in sorted(refs.items()))

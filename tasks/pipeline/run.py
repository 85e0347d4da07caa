"""Execution of stages in order."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol

from rlcore.metrics import is_machine_dependent
from rlcore.tasks.kinds.kind import Stage
from rlcore.tasks.pipeline.budget import metered
from rlcore.tasks.pipeline.cache_keys import level_of
from rlcore.tasks.pipeline.machine import known_machine
from rlcore.tasks.pipeline.pages import is_drawn, page_folder, show_pages
from rlcore.tasks.pipeline.pipeline_run import open_pipeline
from rlcore.tasks.pipeline.plan import order_stages, recorded_refs
from rlcore.tasks.pipeline.prefect_bridge import report_table, task
from rlcore.tasks.pipeline.retrain import note_past
from rlcore.tasks.pipeline.stage_runs import PipelineRun
from rlcore.tasks.pipeline.stages import result_of, run_stage
from rlcore.tasks.presets.run import RunConfig
from rlcore.tasks.steps.base import MODEL
from rlcore.tasks.store.artifacts import MANIFEST, ArtifactRef, ArtifactStore
from rlcore.tasks.store.cache import Record, StageCache, describe_machine
from rlcore.tasks.store.locks import file_lock
from rlcore.tasks.store.scratch import scratch_folder
from rlcore.tasks.store.settings import Home
from rlcore.tasks.store.shared import open_shared_store
from rlcore.tasks.tracking.lineage import read_records
from rlcore.tasks.tracking.mlflow_model import Package, files_below
from rlcore.tasks.tracking.model_card import refresh_cards, write_cards
from rlcore.tasks.tracking.past import PAST
from rlcore.tasks.tracking.registration import register_model
from rlcore.tasks.tracking.registry import find_by_sha256
from rlcore.tasks.tracking.runs import RunTracker, open_tracker

logger = logging.getLogger(__name__)
START = "import_sft"  # the stage that makes the base


class Report(Protocol):
    """Report of a finished run; ``started`` is in the time format of stage records."""

    def __call__(
        self, run: PipelineRun, config: RunConfig, refs: Mapping[str, ArtifactRef], *, started: str
    ) -> object: ...


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

    Once the base exists, the needs of the stages that will run are compared with the device's memory. Under Prefect
    each stage is a task of the flow run. The MLflow experiment ``experiment`` gets one run for the pipeline, with a
    child run for each computed stage.
    Raises:
        ConfigError: a stage needs more memory than the GPU has.
        StorageError: the shared store, if there is one, cannot be used.
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
            if stage.name == START:
                done = recorded_refs(stages, config, targets, home=home)
                _show_memory(config, home, refs, [each.name for each in ordered if each.name not in done])
        complete_cards(ordered, refs, preset=config.name, run=run)
        if report is not None:
            report(run, config, refs, started=parent.began)
    _report(refs, parent)
    return refs


def _machine(config: RunConfig) -> str:
    """Log and return the machine as text, with a warning if it computes slowly."""
    found = known_machine(config.hardware)
    machine = describe_machine(found.facts)
    logger.info("machine: %s", machine)
    if found.warning:
        logger.warning("%s", found.warning)
    return machine


def _show_memory(config: RunConfig, home: Home, refs: Mapping[str, ArtifactRef], stages: Sequence[str]) -> None:
    if not stages:
        return
    from rlcore.tasks.pipeline.memory_plan import memory_lines
    from rlcore.tasks.pipeline.model_facts import model_facts

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
    """Register the model and render the page of a stage under the preset's name, unless done before."""
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
    """Return the recorded confidence level of the intervals in each artifact that has some."""
    records = {name: cache.find(name, ref.stage_key) for name, ref in refs.items()}
    return {name: level for name, each in records.items() if each and (level := level_of(each.ingredients))}


def _report(refs: Mapping[str, ArtifactRef], parent: RunTracker) -> None:
    rows = [
        {"stage": name, "sha256": ref.sha256[:12], "rows": ref.rows, "bytes": ref.bytes, "uri": ref.uri}
        for name, ref in refs.items()
    ]
    report_table("artifacts", rows, f"artifacts of MLflow run {parent.run_id}")


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
    cards = write_cards(run.home, records, record, name=name, version=None, tags=tags)
    folder = run.store.path(ref)
    # Seconds of a killed attempt are in the run's curves already; they are no facts of a model.
    metrics = {metric: value for metric, value in record.metrics.items() if not is_machine_dependent(metric)}
    with scratch_folder(run.home.work) as temporary:
        tags |= {PAST: note_past(run.home, records, record, temporary / PAST)}
        beside = {MANIFEST: folder / MANIFEST} | files_below(temporary)
        package = Package(checkpoint=folder / MODEL, cards=cards, facts=tags, beside=beside)
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

"""Execution of stages in order, and the plan of a run with reasons."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import Literal, Protocol

from rlcore.config import to_dict
from rlcore.errors import ConfigError
from rlcore.tasks.kinds.kind import Stage
from rlcore.tasks.pipeline.cache_keys import explain_miss, key_of
from rlcore.tasks.pipeline.models import complete_cards, register
from rlcore.tasks.pipeline.pages import is_drawn, page_folder, show_pages
from rlcore.tasks.pipeline.pipeline_run import open_pipeline
from rlcore.tasks.pipeline.prefect_bridge import report_table, task
from rlcore.tasks.pipeline.stage_runs import PipelineRun
from rlcore.tasks.pipeline.stages import key_inputs, result_of, run_stage
from rlcore.tasks.presets.run import RunConfig
from rlcore.tasks.store.artifacts import ArtifactRef, ArtifactStore
from rlcore.tasks.store.cache import StageCache, describe_machine
from rlcore.tasks.store.locks import file_lock
from rlcore.tasks.store.settings import Home
from rlcore.tasks.tracking.runs import RunTracker, open_tracker

logger = logging.getLogger(__name__)
START = "import_sft"  # the stage that makes the base


@dataclass(frozen=True, kw_only=True)
class PlanRow:
    """Planned action for a stage.

    ``cached``: its result exists and is intact. ``run``: it will be computed for ``reason``. ``depends``: an upstream
    stage runs, and this one runs only if that result changes.
    """

    stage: str
    state: Literal["cached", "run", "depends"]
    reason: str


def order_stages(stages: Sequence[Stage], targets: Collection[str]) -> tuple[Stage, ...]:
    """Return the targets and everything that they need, each after its inputs, otherwise in the given order.

    Raises:
        ConfigError: two stages of one name, an unknown name, or stages that depend on each other.
    """
    known = {stage.name: stage for stage in stages}
    if len(known) != len(stages):
        raise ConfigError(f"two stages have the same name: {', '.join(stage.name for stage in stages)}")
    needed: dict[str, tuple[str, ...]] = {}
    waiting = list(targets)
    while waiting:
        name = waiting.pop()
        if name not in known:
            raise ConfigError(f"unknown stage {name!r}", fix=f"choose among {', '.join(known)}")
        if name not in needed:
            needed[name] = known[name].inputs
            waiting += known[name].inputs
    try:
        ordered = TopologicalSorter({name: needed[name] for name in known if name in needed}).static_order()
        return tuple(known[name] for name in ordered)
    except CycleError as error:
        raise ConfigError(
            f"stages depend on each other: {' -> '.join(error.args[1])}",
            fix="change init_from or data of one stage",
        ) from error


def plan(stages: Sequence[Stage], config: RunConfig, targets: Collection[str], *, home: Home) -> tuple[PlanRow, ...]:
    """Return the plan of :func:`run_pipeline`. Nothing runs; files are verified by hashing."""
    return _look_up(stages, config, targets, home=home)[0]


def cached_refs(
    stages: Sequence[Stage], config: RunConfig, targets: Collection[str], *, home: Home
) -> Mapping[str, ArtifactRef]:
    """Return the artifacts of the stages that :func:`run_pipeline` would not run now, by name. Nothing runs."""
    return _look_up(stages, config, targets, home=home)[1]


def recorded_refs(
    stages: Sequence[Stage], config: RunConfig, targets: Collection[str], *, home: Home
) -> Mapping[str, ArtifactRef]:
    """Return :func:`cached_refs` from the records alone: no file is read, so damaged files are not noticed."""
    cache, known = StageCache(home.cache), dict[str, ArtifactRef]()
    for stage in order_stages(stages, targets):
        if all(name in known for name in stage.inputs):
            record = cache.find(stage.name, key_of(key_inputs(stage, config, known)))
            known |= {stage.name: record.ref} if record else {}
    return known


def format_plan(rows: Iterable[PlanRow]) -> str:
    """Format the plan as human-readable lines."""
    rows = tuple(rows)
    width = max((len(row.stage) for row in rows), default=0)
    return "\n".join(f"{row.stage:<{width}}  {row.state:<7}  {row.reason}".rstrip() for row in rows)


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

    Once the base exists, the needs of the stages are compared with the device's memory. Under Prefect each stage is a
    task of the flow run. The MLflow experiment ``experiment`` gets one run for the pipeline, with a child run for each
    computed stage.
    Raises:
        ConfigError: a stage needs more memory than the GPU has.
    """
    ordered, machine = order_stages(stages, targets), _machine(config)
    tracker = open_tracker(home)
    refs: dict[str, ArtifactRef] = {}
    with open_pipeline(home, tracker, experiment, config, targets) as parent:
        parent.set_tags({"machine": machine})
        run = PipelineRun(
            home=home,
            store=ArtifactStore(home.root),
            cache=StageCache(home.cache),
            tracker=tracker,
            experiment=experiment,
            parent=parent,
        )
        for stage in ordered:
            refs[stage.name] = _run_stage_task(stage, config, {name: refs[name] for name in stage.inputs}, run)
            if stage.name == START:
                _show_memory(config, home, refs, [each.name for each in ordered])
        complete_cards(ordered, refs, preset=config.name, run=run)
        if report is not None:
            report(run, config, refs, started=parent.began)
    _report(refs, parent)
    return refs


def _machine(config: RunConfig) -> str:
    """Log and return the machine as text, with a warning if it computes slowly."""
    from rlcore.hardware.machine import (
        find_machine,
        slow_dtype_warning,
    )  # brings torch

    found = find_machine(config.hardware)
    machine = describe_machine(to_dict(found))
    logger.info("machine: %s", machine)
    if slow := slow_dtype_warning(found):
        logger.warning("%s", slow)
    return machine


def _show_memory(config: RunConfig, home: Home, refs: Mapping[str, ArtifactRef], stages: Sequence[str]) -> None:
    from rlcore.tasks.pipeline.memory_plan import (
        memory_lines,
    )  # brings torch

    for line in memory_lines(config, home, refs, stages):
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
    result = result_of(
        stage, config, run.store.path(ref), {name: run.store.path(each) for name, each in inputs.items()}
    )
    if not is_drawn(stage.render_page, result, folder):
        show_pages(stage.render_page, result, folder, run.parent)


def _look_up(
    stages: Sequence[Stage], config: RunConfig, targets: Collection[str], *, home: Home
) -> tuple[tuple[PlanRow, ...], Mapping[str, ArtifactRef]]:
    store, cache = ArtifactStore(home.root), StageCache(home.cache)
    known: dict[str, ArtifactRef] = {}
    rows = []
    for stage in order_stages(stages, targets):
        row, ref = _plan_stage(stage, config, known, store, cache)
        rows.append(row)
        if ref is not None:
            known[stage.name] = ref
    return tuple(rows), known


def _plan_stage(
    stage: Stage, config: RunConfig, known: Mapping[str, ArtifactRef], store: ArtifactStore, cache: StageCache
) -> tuple[PlanRow, ArtifactRef | None]:
    ingredients = key_inputs(stage, config, known)
    unknown = [name for name in stage.inputs if name not in known]
    if unknown:
        reason = explain_miss(ingredients, cache.records(stage.name), unknown=unknown)
        if reason:
            return PlanRow(stage=stage.name, state="run", reason=reason), None
        return PlanRow(stage=stage.name, state="depends", reason=f"on the result of {', '.join(unknown)}"), None
    record = cache.find(stage.name, key_of(ingredients))
    if record is None:
        return PlanRow(stage=stage.name, state="run", reason=explain_miss(ingredients, cache.records(stage.name))), None
    errors = store.errors(record.ref)
    if errors:
        reason = f"artifact missing or damaged: {errors[0]}"
        return PlanRow(stage=stage.name, state="run", reason=reason), None
    return PlanRow(stage=stage.name, state="cached", reason=""), record.ref


def _report(refs: Mapping[str, ArtifactRef], parent: RunTracker) -> None:
    rows = [
        {"stage": name, "sha256": ref.sha256[:12], "rows": ref.rows, "bytes": ref.bytes, "uri": ref.uri}
        for name, ref in refs.items()
    ]
    report_table("artifacts", rows, f"artifacts of MLflow run {parent.run_id}")

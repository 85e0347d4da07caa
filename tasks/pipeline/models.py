"""Registration of models under the run's name, after the stage, also if the stage was cached."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from rlcore.metrics import is_machine_dependent
from rlcore.tasks.kinds.kind import Stage
from rlcore.tasks.pipeline.retrain import note_past
from rlcore.tasks.pipeline.stage_runs import PipelineRun
from rlcore.tasks.steps.base import MODEL
from rlcore.tasks.store.artifacts import MANIFEST, ArtifactRef
from rlcore.tasks.store.cache import Record, describe_machine
from rlcore.tasks.store.scratch import scratch_folder
from rlcore.tasks.tracking.lineage import read_records
from rlcore.tasks.tracking.mlflow_model import Package, files_below
from rlcore.tasks.tracking.model_card import write_cards
from rlcore.tasks.tracking.model_descriptions import refresh_cards
from rlcore.tasks.tracking.past import PAST
from rlcore.tasks.tracking.registration import register_model
from rlcore.tasks.tracking.registry import find_by_sha256

logger = logging.getLogger(__name__)


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

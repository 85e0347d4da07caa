"""Registration of a checkpoint: a logged model of its run, and the next version of a registered model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rlcore.tasks.store.scratch import scratch_folder
from rlcore.tasks.store.settings import find_home
from rlcore.tasks.tracking.files import local_path
from rlcore.tasks.tracking.mlflow_model import PACKAGE, Package, package_sha256, write_package
from rlcore.tasks.tracking.registry import ModelVersion, as_version
from rlcore.tasks.tracking.retry import ignore_existing
from rlcore.tasks.tracking.runs import RunTracker

if TYPE_CHECKING:
    from mlflow.entities import LoggedModel, LoggedModelOutput

_NOT_IN_LABELS = str.maketrans(dict.fromkeys("/:.%\"'", "_"))  # MLflow rejects these in the name of a logged model


def register_model(
    run: RunTracker, package: Package, *, name: str, tags: Mapping[str, str], metrics: Mapping[str, float] | None = None
) -> ModelVersion:
    """Store a checkpoint as a logged model of ``run`` and register it as the next version of ``name``.

    ``tags`` go to both and include ``sha256``, the digest of the artifact. ``metrics`` belong to the logged model. The
    version comes last: a repeated call after a kill continues with its logged model.
    """
    from mlflow.entities import LoggedModelOutput

    client = run.client
    label = name.translate(_NOT_IN_LABELS)
    model = _begun(run, label, tags["sha256"]) or client.create_logged_model(
        run.experiment_id, name=label, source_run_id=run.run_id, tags=dict(tags), model_type="checkpoint"
    )
    if PACKAGE not in model.tags:
        _store(run, package, name, model)
    if str(model.status) != "READY":
        client.finalize_logged_model(model.model_id, "READY")
    if model.model_id not in {output.model_id for output in _outputs(run)}:
        client.log_outputs(run.run_id, [LoggedModelOutput(model.model_id, step=0)])
    run.log_model_metrics(model.model_id, metrics or {})
    ignore_existing(client.create_registered_model, name)
    version = client.create_model_version(
        name,
        f"models:/{model.model_id}",
        run_id=run.run_id,
        # A version in a database does not keep the id itself. Who logs runs can change a logged model's tags later.
        tags={**tags, "model_id": model.model_id, PACKAGE: client.get_logged_model(model.model_id).tags[PACKAGE]},
        model_id=model.model_id,
    )
    return as_version(version)


def _begun(run: RunTracker, label: str, sha256: str) -> LoggedModel | None:
    """Return the logged model of this artifact that ``run`` already has."""
    query = f"source_run_id = '{run.run_id}' AND name = '{label}' AND tags.sha256 = '{sha256}'"
    found = run.client.search_logged_models([run.experiment_id], filter_string=query)
    return found[0] if found else None


def _outputs(run: RunTracker) -> Sequence[LoggedModelOutput]:
    outputs = run.client.get_run(run.run_id).outputs
    return outputs.model_outputs if outputs else ()


def _store(run: RunTracker, package: Package, name: str, model: LoggedModel) -> None:
    """Write the model's files to MLflow's location: directly, or through its server."""
    if (folder := local_path(model.artifact_location)) is not None:
        if not folder.exists():  # complete, from a call that was killed afterwards
            write_package(package, name, folder, model)
        digest = package_sha256(folder)
    else:
        with scratch_folder(find_home().work) as temporary:  # the artifacts' disk: weights are links
            write_package(package, name, temporary / name, model)
            run.client.log_model_artifacts(model.model_id, str(temporary / name))
            digest = package_sha256(temporary / name)
    run.client.set_logged_model_tags(model.model_id, {PACKAGE: digest})

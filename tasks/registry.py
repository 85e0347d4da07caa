"""Models by name and version: plain files registered with MLflow, never pickles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.tracking import RunTracker, Tracker, or_none, unless_exists

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion as MlflowVersion


@dataclass(frozen=True, kw_only=True)
class ModelVersion:
    """A version in the registry; ``model_id`` and the artifact's ``sha256`` are empty if others registered it."""

    name: str
    version: int
    model_id: str
    sha256: str


def register_model(run: RunTracker, folder: Path, *, name: str, tags: Mapping[str, str]) -> ModelVersion:
    """Store a checkpoint's files as a logged model of ``run`` and register them as the next version of ``name``.

    ``tags`` go to both; they hold ``sha256``, the digest of the artifact.
    """
    client = run.client
    model = client.create_logged_model(
        run.experiment_id, name=name, source_run_id=run.run_id, tags=dict(tags), model_type="checkpoint"
    )
    client.log_model_artifacts(model.model_id, str(folder))
    client.finalize_logged_model(model.model_id, "READY")
    unless_exists(client.create_registered_model, name)
    version = client.create_model_version(
        name,
        f"models:/{model.model_id}",
        run_id=run.run_id,
        tags={**tags, "model_id": model.model_id},  # a version in a database does not keep the id itself
        model_id=model.model_id,
    )
    return _model_version(version)


def find_version(tracker: Tracker, name: str, alias: str) -> ModelVersion | None:
    """The version that carries an alias (``champion``), or None."""
    model = or_none(tracker.client.get_registered_model, name)
    version = model.aliases.get(alias) if model else None
    return None if version is None else _model_version(tracker.client.get_model_version(name, str(version)))


def set_alias(tracker: Tracker, version: ModelVersion, alias: str) -> None:
    """Point an alias at a version: the promotion of a model, and its roll-back."""
    tracker.client.set_registered_model_alias(version.name, alias, str(version.version))


def _model_version(version: MlflowVersion) -> ModelVersion:
    return ModelVersion(
        name=version.name,
        version=int(version.version),
        model_id=version.tags.get("model_id", ""),
        sha256=version.tags.get("sha256", ""),
    )

"""Removal from MLflow: weights of registered versions.

A cleaned version stays in the registry with its tags, cards and the record of its data. Its tag ``cleaned`` comes
before the removal and has the date after it, so that a killed call is repeated.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from rlcore.tasks.tracking.files import local_path
from rlcore.tasks.tracking.mlflow_model import CLEANED, WEIGHTS
from rlcore.tasks.tracking.registry import ModelVersion, as_version, pages, set_tags
from rlcore.tasks.tracking.runs import Tracker

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion as MlflowVersion

_BEGUN = "not finished"


@dataclass(frozen=True, kw_only=True)
class HeldVersion:
    """Registered version of rlcore, with its aliases. ``created``: seconds since 1970."""

    version: ModelVersion
    stage_key: str
    aliases: tuple[str, ...]
    created: float
    has_files: bool


def held_versions(tracker: Tracker) -> list[HeldVersion]:
    """Return all registered versions that rlcore made."""
    aliases: dict[tuple[str, str], tuple[str, ...]] = {}
    for model in pages(tracker.client.search_registered_models):
        for alias, number in model.aliases.items():
            key = (model.name, str(number))
            aliases[key] = (*aliases.get(key, ()), alias)
    versions = pages(tracker.client.search_model_versions)
    return [_held(each, aliases.get((each.name, str(each.version)), ())) for each in versions if "sha256" in each.tags]


def weights_of(tracker: Tracker, version: ModelVersion) -> tuple[Path, ...]:
    """Return the folders with a version's weights; empty if a server has them."""
    folder = local_path(_location(tracker, version))
    return tuple(folder / each for each in WEIGHTS) if folder else ()


def clean_version(tracker: Tracker, version: ModelVersion) -> bool:
    """Remove a version's weights unless it has an alias; return True if they were removed."""
    model = tracker.client.get_registered_model(version.name)
    if str(version.version) in map(str, model.aliases.values()):
        return False
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    set_tags(tracker, version, {CLEANED: _BEGUN})
    repository = get_artifact_repository(_location(tracker, version))
    for each in WEIGHTS:
        repository.delete_artifacts(each)  # type: ignore[no-untyped-call]
    set_tags(tracker, version, {CLEANED: f"{datetime.now(UTC):%Y-%m-%d}"})
    return True


def _held(version: MlflowVersion, aliases: tuple[str, ...]) -> HeldVersion:
    return HeldVersion(
        version=as_version(version),
        stage_key=version.tags.get("stage_key", ""),
        aliases=aliases,
        created=version.creation_timestamp / 1000.0,
        has_files=version.tags.get(CLEANED, _BEGUN) == _BEGUN,
    )


def _location(tracker: Tracker, version: ModelVersion) -> str:
    return str(tracker.client.get_logged_model(version.model_id).artifact_location)

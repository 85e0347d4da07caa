"""Model registry: versions registered with MLflow as plain files, never pickles; their tags, aliases and removal.

:mod:`rlcore.tasks.promotion.champion` moves the aliases that say which version is served. A cleaned version stays with
its tags, cards and the record of its data. Its tag ``cleaned`` comes before the removal of the weights and has the date
after it, so that a killed call is repeated.
"""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcore.errors import ModelError, shown
from rlcore.tasks.store.artifacts import MANIFEST
from rlcore.tasks.store.audit_log import read_entries
from rlcore.tasks.store.locks import file_lock, scratch_folder
from rlcore.tasks.store.settings import Home, find_home
from rlcore.tasks.tracking.database import database_of, stored_version, stored_versions
from rlcore.tasks.tracking.mlflow_model import (
    CLEANED,
    PACKAGE,
    WEIGHTS,
    Package,
    checkpoint_in,
    local_path,
    package_sha256,
    require_files,
    verified_checkpoint,
    write_package,
)
from rlcore.tasks.tracking.retry import ignore_existing, none_if_missing
from rlcore.tasks.tracking.runs import RunTracker, Tracker, open_tracker

if TYPE_CHECKING:
    from mlflow.entities import LoggedModel
    from mlflow.entities.model_registry import ModelVersion as MlflowVersion

logger = logging.getLogger(__name__)

CHAMPION, CHALLENGER, PREVIOUS, CANDIDATE = "champion", "challenger", "previous", "candidate"
_MODELS = "models:/"
_MAX_TAG = 5000  # characters of a tag in MLflow
_NOT_IN_LABELS = str.maketrans(dict.fromkeys("/:.%\"'", "_"))  # MLflow rejects these in the name of a logged model
_BEGUN = "not finished"


@dataclass(frozen=True, kw_only=True)
class ModelVersion:
    """Version in the registry; ``model_id`` and the artifact's ``sha256`` are empty if rlcore did not register it."""

    name: str
    version: int
    model_id: str
    sha256: str


def download_model(uri: str, folder: Path) -> Path:
    """Download a registered model (``models:/policy/3``, ``models:/policy@champion``) and return its checkpoint.

    Files are compared with their registered digests, if there are any.
    Raises:
        ModelError: there is no such model, its files were cleaned, or one of them is damaged.
    """
    from mlflow.artifacts import download_artifacts
    from mlflow.exceptions import MlflowException

    home = find_home()
    tracker = open_tracker(home)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        uri, tags = _resolved(tracker, uri)
        require_files(uri, tags)
        files = Path(download_artifacts(artifact_uri=uri, dst_path=str(folder)))
    except (MlflowException, OSError) as error:
        raise ModelError(f"cannot load the registered model: {error}", where=uri) from error
    if "sha256" not in tags:
        logger.warning("%s was not registered by rlcore, so its files have no digest to compare with", uri)
        return checkpoint_in(files)
    if tags.get(PACKAGE) not in (None, package_sha256(files)):
        what = "the registered model is not what was registered: a file beside the weights is damaged"
        raise ModelError(what, where=uri, fix="restore MLflow's files of this version from a backup")
    manifest = home.root / tags.get("artifact", "") / MANIFEST
    return verified_checkpoint(files, sha256=tags["sha256"], manifest=manifest, uri=uri)


def _resolved(tracker: Tracker, uri: str) -> tuple[str, Mapping[str, str]]:
    """Return a model's URI without its alias, which may move meanwhile, and the version's tags."""
    name, _, number = uri.removeprefix(_MODELS).partition("/")
    name, _, alias = name.partition("@")
    if alias:
        number = str(tracker.client.get_model_version_by_alias(name, alias).version)
    if number:
        return f"{_MODELS}{name}/{number}", tracker.client.get_model_version(name, number).tags
    return uri, tracker.client.get_logged_model(name).tags


def find_version(tracker: Tracker, name: str, alias: str) -> ModelVersion | None:
    """Return the version with an alias (``champion``), or None."""
    is_name = bool(name.strip()) and not {"/", ":"} & set(name)  # MLflow registers no other
    model = none_if_missing(tracker.client.get_registered_model, name) if is_name else None
    version = model.aliases.get(alias) if model else None
    return None if version is None else as_version(tracker.client.get_model_version(name, str(version)))


def champions(tracker: Tracker, known: Collection[str] = ()) -> dict[str, ModelVersion]:
    """Return the champion of each registered model that is ``known``, or of which rlcore registered a version."""
    own = {each.name for each in pages(tracker.client.search_model_versions) if "sha256" in each.tags}
    named = {each.name: each.aliases.get(CHAMPION) for each in pages(tracker.client.search_registered_models)}
    return {
        name: as_version(tracker.client.get_model_version(name, str(named[name])))
        for name in sorted({*own, *known})
        if named.get(name)
    }


def find_number(tracker: Tracker, name: str, number: str) -> ModelVersion | None:
    """Return version ``number`` of a registered model, or None."""
    version = none_if_missing(tracker.client.get_model_version, name, number) if number.isdecimal() else None
    return as_version(version) if version else None


def find_by_sha256(tracker: Tracker, name: str, sha256: str) -> ModelVersion | None:
    """Return the newest version of ``name`` with that artifact digest and its files, or None."""
    versions = tracker.client.search_model_versions(f"name = '{name}' and tags.sha256 = '{sha256}'")
    found = [each for each in versions if CLEANED not in each.tags]
    return as_version(max(found, key=lambda each: int(each.version))) if found else None


def read_version(home: Home, model: str) -> Mapping[str, str]:
    """Return name, number and tags of the version that ``tiny-grpo@champion`` or ``models:/tiny-grpo/3`` names.

    Without a server they are read without MLflow, whose import takes longer than the rest of a lineage.
    Raises:
        ModelError: there is none.
    """
    name, _, alias = model.removeprefix("models:/").partition("@")
    name, _, number = name.partition("/")
    if path := database_of(home):
        found = stored_version(path, name, alias=alias, number=number)
    else:
        tracker = open_tracker(home)
        version = find_version(tracker, name, alias) if alias else find_number(tracker, name, number)
        found = {"version": str(version.version), **read_tags(tracker, version)} if version else None
    if found is None:
        own = [f"{each.name}/{each.version}" for each in (stored_versions(path, {name}) if path else ())]
        fix = "write name@champion or name/3; if it was trained in another folder, set RLCORE_HOME to its .rlcore"
        raise ModelError(
            f"there is no registered model {model!r}",
            where=str(path or os.environ["MLFLOW_TRACKING_URI"]),
            fix=f"name one of {', '.join(own)}" if own else fix,
        )
    return {"name": name, **found}


def read_tags(tracker: Tracker, version: ModelVersion) -> dict[str, str]:
    """Return the tags of a version: digests, parents, code, and decision."""
    return dict(tracker.client.get_model_version(version.name, str(version.version)).tags)


def set_tags(tracker: Tracker, version: ModelVersion, tags: Mapping[str, str]) -> None:
    """Add or change tags of a version."""
    for name, value in tags.items():
        tracker.client.set_model_version_tag(version.name, str(version.version), name, as_tag(value))


def as_tag(text: str) -> str:
    """Return a text as a tag that MLflow takes: short, without control characters."""
    return shown(text, max_chars=_MAX_TAG)


def remove_tag(tracker: Tracker, version: ModelVersion, name: str) -> None:
    """Remove a tag of a version, if it has it."""
    if name in read_tags(tracker, version):
        tracker.client.delete_model_version_tag(version.name, str(version.version), name)


def set_alias(tracker: Tracker, version: ModelVersion, alias: str) -> None:
    """Point an alias at a version."""
    tracker.client.set_registered_model_alias(version.name, alias, str(version.version))


def count_look(home: Home, tracker: Tracker, name: str, *, data: str, pair: str) -> int:
    """Return the number of this look at the held-out prompts, from 1; the same pair at the same prompts keeps it.

    Looks of all registered models count together, because trying ten models under ten names finds a "better" one as
    easily. They are tags of the registered model ``name``: ``look.<data>.<pair>``, with truncated digests.
    """
    with registry_lock(home):
        # Models that the log does not name do not count: every user of MLflow can make one with such tags.
        prefix, own = f"look.{data}.", {name, *(each.model for each in read_entries(home))}
        known = {
            tag.removeprefix(prefix): number
            for model in pages(tracker.client.search_registered_models)
            for tag, number in model.tags.items()
            if model.name in own and tag.startswith(prefix)
        }
        if known.get(pair, "").isdecimal():
            return max(1, int(known[pair]))
        look = 1 + len(known)
        tracker.client.set_registered_model_tag(name, f"{prefix}{pair}", str(look))
    return look


def pages(search: Callable[..., Any]) -> Iterator[Any]:
    """Yield everything that a search of MLflow's client finds."""
    token: str | None = None
    while True:
        page = search(page_token=token)
        yield from page
        token = page.token
        if not token:
            return


def registry_lock(home: Home) -> AbstractContextManager[bool]:
    """Hold the lock under which aliases and looks change; promotions of one state directory never interleave."""
    return file_lock(home.root / "registry.lock")


def as_version(version: MlflowVersion) -> ModelVersion:
    """Convert a version of MLflow."""
    return ModelVersion(
        name=version.name,
        version=int(version.version),
        model_id=version.tags.get("model_id", ""),
        sha256=version.tags.get("sha256", ""),
    )


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
    query = f"source_run_id = '{run.run_id}' AND name = '{label}' AND tags.sha256 = '{tags['sha256']}'"
    begun = client.search_logged_models([run.experiment_id], filter_string=query)
    model = next(iter(begun), None) or client.create_logged_model(
        run.experiment_id, name=label, source_run_id=run.run_id, tags=dict(tags), model_type="checkpoint"
    )
    if PACKAGE not in model.tags:
        _store(run, package, name, model)
    if str(model.status) != "READY":
        client.finalize_logged_model(model.model_id, "READY")
    outputs = client.get_run(run.run_id).outputs
    if model.model_id not in {output.model_id for output in (outputs.model_outputs if outputs else ())}:
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


def _store(run: RunTracker, package: Package, name: str, model: LoggedModel) -> None:
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
    aliases = defaultdict[tuple[str, str], list[str]](list)
    for model in pages(tracker.client.search_registered_models):
        for alias, number in model.aliases.items():
            aliases[model.name, str(number)].append(alias)
    return [
        HeldVersion(
            version=as_version(each),
            stage_key=each.tags.get("stage_key", ""),
            aliases=tuple(aliases[each.name, str(each.version)]),
            created=each.creation_timestamp / 1000.0,
            has_files=each.tags.get(CLEANED, _BEGUN) == _BEGUN,
        )
        for each in pages(tracker.client.search_model_versions)
        if "sha256" in each.tags
    ]


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


def _location(tracker: Tracker, version: ModelVersion) -> str:
    return str(tracker.client.get_logged_model(version.model_id).artifact_location)

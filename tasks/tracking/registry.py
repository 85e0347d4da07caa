"""Model registry: versions registered with MLflow as plain files, never pickles, and the champion.

The aliases of a registered model: ``champion`` (served), ``previous`` (target of a rollback), ``challenger`` (last
rejected). MLflow cannot move an alias conditionally, so all moves are made under a lock in the state directory:
promotions of one state directory never interleave. State directories that share a server do not see each other's lock.
All moves can be repeated after a kill: a promotion moves the champion last, a rollback first.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from rlcore.errors import ModelError, PromotionError
from rlcore.tasks.store.artifacts import MANIFEST
from rlcore.tasks.store.locks import file_lock
from rlcore.tasks.store.settings import Home, find_home
from rlcore.tasks.tracking.database import database_of, stored_version
from rlcore.tasks.tracking.errors import none_if_missing
from rlcore.tasks.tracking.mlflow_model import CLEANED, checkpoint_in, require_files, verified_checkpoint
from rlcore.tasks.tracking.runs import Tracker, open_tracker

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion as MlflowVersion

logger = logging.getLogger(__name__)

CHAMPION, CHALLENGER, PREVIOUS = "champion", "challenger", "previous"
_PROMOTED_OVER, _ROLLED_BACK = "promoted_over", "rolled_back"  # tags of a version
_MODELS = "models:/"
_NONE: Mapping[str, str] = MappingProxyType({})
_FIRST = "none"  # the champion at the time of the promotion


@dataclass(frozen=True, kw_only=True)
class ModelVersion:
    """Version in the registry; ``model_id`` and the artifact's ``sha256`` are empty if rlcore did not register it."""

    name: str
    version: int
    model_id: str
    sha256: str


def download_model(uri: str, folder: Path) -> Path:
    """Download a registered model (``models:/policy/3``, ``models:/policy@champion``) and return its checkpoint.

    Each file is compared with its registered digest; versions of other tools have none.
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
    model = none_if_missing(tracker.client.get_registered_model, name)
    version = model.aliases.get(alias) if model else None
    return None if version is None else as_version(tracker.client.get_model_version(name, str(version)))


def find_champion(home: Home, tracker: Tracker, name: str) -> ModelVersion | None:
    """Return the champion, or None; complete a promotion that was killed between its two steps."""
    with _lock(home):
        champion = find_version(tracker, name, CHAMPION)
        if champion is not None and last_champion(tracker, name) != str(champion.version):
            _crown(tracker, champion)
    return champion


def last_champion(tracker: Tracker, name: str) -> str:
    """Return the latest version that became champion, whether or not the alias exists; empty if none did."""
    model = none_if_missing(tracker.client.get_registered_model, name)
    return model.tags.get(CHAMPION) or model.aliases.get(PREVIOUS, "") if model else ""


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

    Without a server they are read from MLflow's database directly: importing MLflow takes longer than the rest of a
    lineage.
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
        raise ModelError(
            f"there is no registered model {model!r}",
            where=str(path or os.environ["MLFLOW_TRACKING_URI"]),
            fix="write name@champion or name/3; if it was trained in another folder, set RLCORE_HOME to its .rlcore",
        )
    return {"name": name, **found}


def read_tags(tracker: Tracker, version: ModelVersion) -> dict[str, str]:
    """Return the tags of a version: digests, parents, code, and decision."""
    return dict(tracker.client.get_model_version(version.name, str(version.version)).tags)


def set_tags(tracker: Tracker, version: ModelVersion, tags: Mapping[str, str]) -> None:
    """Add or change tags of a version."""
    for name, value in tags.items():
        tracker.client.set_model_version_tag(version.name, str(version.version), name, value)


def set_alias(tracker: Tracker, version: ModelVersion, alias: str) -> None:
    """Point an alias at a version; only :func:`promote` and :func:`roll_back` move the champion."""
    tracker.client.set_registered_model_alias(version.name, alias, str(version.version))


def count_look(home: Home, tracker: Tracker, name: str, *, data: str, pair: str) -> int:
    """Return the number of this look at the held-out prompts, from 1; the same pair at the same prompts keeps it.

    Looks of all registered models count together, because trying ten models under ten names finds a "better" one as
    easily. They are tags of the registered model ``name``: ``look.<data>.<pair>``, with truncated digests.
    """
    with _lock(home):
        prefix = f"look.{data}."
        known = {
            tag.removeprefix(prefix): int(number)
            for model in pages(tracker.client.search_registered_models)
            for tag, number in model.tags.items()
            if tag.startswith(prefix)
        }
        if pair in known:
            return known[pair]
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


def promote(
    home: Home, tracker: Tracker, version: ModelVersion, *, over: ModelVersion | None, tags: Mapping[str, str] = _NONE
) -> bool:
    """Make a version the champion instead of ``over``, with which it was compared; False if it is champion already.

    Its ``tags`` are set before it becomes the champion.
    Raises:
        PromotionError: the champion is no longer ``over``, or the version was rolled back before.
    """
    with _lock(home):
        champion = find_version(tracker, version.name, CHAMPION)
        if champion == version:
            _crown(tracker, version)  # completes a promotion that was killed between its two steps
            _remove_alias(tracker, version, CHALLENGER)
            return False
        if champion != over:
            raise PromotionError(
                f"version {version.version} was compared with {_words(over)}, but {_words(champion)} is champion now",
                where=f"registered model {version.name}",
                fix="run the flow promote again: it compares with the present champion",
            )
        if _ROLLED_BACK in read_tags(tracker, version):
            raise PromotionError(
                f"version {version.version} was champion before and has been rolled back",
                where=f"registered model {version.name}",
                fix=f"train another, or delete the version's tag {_ROLLED_BACK} when the reason is gone",
            )
        set_tags(tracker, version, {**tags, _PROMOTED_OVER: str(over.version) if over else _FIRST})
        if over is not None:
            set_alias(tracker, over, PREVIOUS)
        _crown(tracker, version)
        _remove_alias(tracker, version, CHALLENGER)
    return True


def roll_back(home: Home, tracker: Tracker, name: str, *, version: int, reason: str) -> ModelVersion:
    """Roll back version ``version`` and return the previous champion, which is champion again.

    ``previous`` then names the one before, so that rollbacks can be repeated. If the version was rolled back already,
    nothing changes: a repeated call does not roll back a second version.
    Raises:
        PromotionError: the version is not the champion, or there is no previous one.
    """
    where = f"registered model {name}"
    with _lock(home):
        champion, previous = find_version(tracker, name, CHAMPION), find_version(tracker, name, PREVIOUS)
        if champion is None:
            raise PromotionError("there is no champion, so nothing to roll back", where=where, fix="see rlcore ui")
        down = find_number(tracker, name, str(version))
        if champion != down:
            if down is None or _ROLLED_BACK not in read_tags(tracker, down):
                what = f"version {version} is not the champion, {_words(champion)} is"
                raise PromotionError(what, where=where, fix=f"name the version to take down: {champion.version}")
            _crown(tracker, champion)
            _finish_roll_back(tracker, champion)
            return champion
        if previous is None or previous == champion:
            what = f"version {version} is the first champion: there is none before it"
            raise PromotionError(what, where=where, fix="promote another version first")
        set_tags(tracker, down, {_ROLLED_BACK: reason})
        _crown(tracker, previous)
        _finish_roll_back(tracker, previous)
    return previous


def _crown(tracker: Tracker, version: ModelVersion) -> None:
    """Make a version the champion, and record at the model that it has one, so that a lost alias is noticed."""
    set_alias(tracker, version, CHAMPION)
    tracker.client.set_registered_model_tag(version.name, CHAMPION, str(version.version))


def _finish_roll_back(tracker: Tracker, champion: ModelVersion) -> None:
    """Point ``previous`` at the champion before the present one."""
    over = find_number(tracker, champion.name, read_tags(tracker, champion).get(_PROMOTED_OVER, _FIRST))
    if over is None or CLEANED in read_tags(tracker, over):
        _remove_alias(tracker, champion, PREVIOUS, whatever=True)
    else:
        set_alias(tracker, over, PREVIOUS)


def _remove_alias(tracker: Tracker, version: ModelVersion, alias: str, *, whatever: bool = False) -> None:
    """Remove an alias that points at ``version``, or at any if ``whatever``."""
    holder = find_version(tracker, version.name, alias)
    if holder is not None and (whatever or holder == version):
        tracker.client.delete_registered_model_alias(version.name, alias)


def _lock(home: Home) -> AbstractContextManager[bool]:
    return file_lock(home.root / "registry.lock")


def _words(version: ModelVersion | None) -> str:
    return f"version {version.version}" if version else "no version"


def as_version(version: MlflowVersion) -> ModelVersion:
    """Convert a version of MLflow."""
    return ModelVersion(
        name=version.name,
        version=int(version.version),
        model_id=version.tags.get("model_id", ""),
        sha256=version.tags.get("sha256", ""),
    )

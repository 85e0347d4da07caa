"""Inputs of a version, stored in MLflow so that later data can be compared without the state directory.

``past.json`` has the nearest artifact of each stage, the recipe's digest, and digests of the other files. Each dataset
has ``<artifact>/report.json`` with the digest and the sketches of its rows, and preference pairs also
``<artifact>/prompts.parquet`` with hashes of the training prompts. The digest of ``past.json`` is a tag of the version,
so that no damaged record is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rlcore.errors import StorageError
from rlcore.tasks.store.artifacts import file_errors
from rlcore.tasks.store.scratch import scratch_folder
from rlcore.tasks.store.settings import Home
from rlcore.tasks.store.storage import file_sha256, link_or_copy, read_json, write_json
from rlcore.tasks.tracking.mlflow_model import PAST
from rlcore.tasks.tracking.registry import ModelVersion, read_tags, set_tags
from rlcore.tasks.tracking.runs import Tracker

REPORT, PROMPTS = "report.json", "prompts.parquet"
SEEN_DIGITS = 16
"""Hexadecimal digits of a training prompt's hash: 64 bits distinguish prompts."""
_RECORD = "past.json"
_FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class ChampionLineage:
    """Inputs of a version: the nearest artifact of each stage by its name, and the digest of its recipe.

    ``datasets``: artifacts with stored sketches; ``paired``: those of preference pairs, with stored prompts.
    """

    artifacts: Mapping[str, str]
    recipe: str
    datasets: Mapping[str, str] = field(default_factory=dict)
    paired: tuple[str, ...] = ()


def write_past(past: ChampionLineage, folder: Path) -> str:
    """Write the record of the contents of ``folder``; return its digest."""
    files = {path.relative_to(folder).as_posix(): file_sha256(path) for path in _files(folder)}
    write_json({"format": _FORMAT, **asdict(past), "files": files}, folder / _RECORD)
    return file_sha256(folder / _RECORD)


def add_past(tracker: Tracker, version: ModelVersion, folder: Path, digest: str) -> None:
    """Add a record to a version that has none, or a damaged one. ``folder``: a folder named ``past``."""
    tracker.client.log_model_artifacts(version.model_id, str(folder.parent))
    set_tags(tracker, version, {PAST: digest})


def read_past(home: Home, tracker: Tracker, version: ModelVersion) -> ChampionLineage:
    """Download the record of a version into the folder ``past``, by the digests of its datasets, and return it.

    Raises:
        StorageError: it is missing or damaged.
    """
    digest = read_tags(tracker, version).get(PAST)
    if digest is None:
        raise StorageError("it has none")
    with scratch_folder(home.work) as temporary:
        return _taken_up(home, _downloaded(version, temporary), digest)


def _downloaded(version: ModelVersion, folder: Path) -> Path:
    from mlflow.artifacts import download_artifacts
    from mlflow.exceptions import MlflowException

    uri = f"models:/{version.name}/{version.version}/{PAST}"
    try:
        return Path(download_artifacts(artifact_uri=uri, dst_path=str(folder)))
    except (MlflowException, OSError) as error:
        raise StorageError(f"MLflow has no such files: {error}") from error


def _taken_up(home: Home, folder: Path, digest: str) -> ChampionLineage:
    record = folder / _RECORD
    if not record.is_file() or file_sha256(record) != digest:
        raise StorageError(f"{_RECORD} is damaged or missing")
    values: dict[str, Any] = read_json(record)
    if values.pop("format") != _FORMAT:
        raise StorageError(f"{_RECORD} was written by a newer rlcore")
    if errors := file_errors(folder, {**values.pop("files"), _RECORD: digest}):
        raise StorageError("; ".join(errors[:4]))
    for path in _files(folder):
        link_or_copy(path, home.past / path.relative_to(folder))
    return ChampionLineage(**{**values, "paired": tuple(values["paired"])})


def _files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.glob("*/*")) if path.is_file()]

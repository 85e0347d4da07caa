"""Files of an MLflow run: hard links to those of results where MLflow's are on this disk, else copies.

So rollouts, tables and plots lie once. What is logged must not be changed afterwards; it may be removed or replaced.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlparse

from rlcore.tasks.store.storage import link_or_copy
from rlcore.tasks.tracking.mlflow_model import files_below

if TYPE_CHECKING:
    from mlflow import MlflowClient

_LOCAL = "file"


def log_files(client: MlflowClient, run_id: str, path: Path, folder: str) -> None:
    """Add a file, or all files of a folder, to a run's ``folder``."""
    location = local_path(client.get_run(run_id).info.artifact_uri)
    if location is not None:
        _link(files_below(path) if path.is_dir() else {path.name: path}, location / folder)
    else:
        (client.log_artifacts if path.is_dir() else client.log_artifact)(run_id, str(path), folder)


def local_path(location: str) -> Path | None:
    """Return the path of a location of MLflow; None if a server has it."""
    parsed = urlparse(location)
    return Path(unquote(parsed.path)) if parsed.scheme == _LOCAL else None


def _link(files: Mapping[str, Path], target: Path) -> None:
    for name, path in files.items():
        place = target / name
        place.parent.mkdir(parents=True, exist_ok=True)
        aside = place.with_name(f".{place.name}.new")  # a kill leaves it for the next start to remove
        aside.unlink(missing_ok=True)
        link_or_copy(path, aside)
        aside.replace(place)
        aside.unlink(missing_ok=True)  # rename leaves it if both are names of one file

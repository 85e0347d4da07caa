"""Delivery of a registered model: as a folder for other libraries.

    export_model(find_home(), "tiny-grpo@champion", Path("out"), dtype="bfloat16")   # the folder, or an RlcoreError

Call :func:`rlcore.tasks.store.settings.configure_environment` before.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rlcore.errors import ConfigError, ServiceError, StorageError
from rlcore.models.loading import ExportDtype, export_checkpoint
from rlcore.models.saving import unfinished_prefix
from rlcore.tasks.steps.base import MODEL
from rlcore.tasks.store.artifacts import ArtifactRef, ArtifactStore
from rlcore.tasks.store.locks import announced, scratch_folder
from rlcore.tasks.store.settings import Home
from rlcore.tasks.tracking.lineage import read_records, record_of
from rlcore.tasks.tracking.mlflow_model import CARD
from rlcore.tasks.tracking.model_card import write_card
from rlcore.tasks.tracking.registry import download_model, read_version


@dataclass(frozen=True, kw_only=True)
class RegisteredVersion:
    """Registered version with its files: ``folder`` is the checkpoint, ``tags`` have its ``name`` and ``version``."""

    tags: Mapping[str, str]
    folder: Path


@contextmanager
def open_registered(home: Home, model: str) -> Iterator[RegisteredVersion]:
    """Open the version that ``tiny-grpo@champion`` or ``tiny-grpo/3`` names, its files verified by their digest.

    They are the artifact of its stage, or if this state directory lacks it, a download that is removed at the end.
    Raises:
        ModelError: there is no such version, or its files are gone.
    """
    tags = read_version(home, model)
    stored = home.root / tags["artifact"] if tags.get("artifact") else None
    if stored is not None and not _errors(home, tags):
        yield RegisteredVersion(tags=tags, folder=stored / MODEL)
        return
    with scratch_folder(home.work) as folder:
        yield RegisteredVersion(tags=tags, folder=download_model(f"models:/{tags['name']}/{tags['version']}", folder))


def export_model(home: Home, model: str, folder: Path, *, dtype: ExportDtype = "keep", repo: str = "") -> Path:
    """Write a registered model into ``folder`` for transformers, vLLM and model hubs; return the folder.

    Safetensors in ``dtype`` with merged LoRAs, the tokenizer and its chat template, the generation configuration with
    the EOS ids, and the model card as README.md: for the hub's repository ``repo`` if it is named.
    Raises:
        ModelError: there is no such model, or it is a reward model.
        StorageError: ``folder`` is not empty, or writing fails; then no folder is left.
    """
    target = folder.absolute()
    with open_registered(home, model) as registered, announced(home.work, target.parent, unfinished_prefix(target)):
        export_checkpoint(registered.folder, target, dtype=dtype, readme=_card(home, registered, repo))
    return folder


def export_card(home: Home, model: str, folder: Path, *, repo: str) -> Path:
    """Write only the card that an export for ``repo`` would have; return the file.

    Raises:
        ModelError: there is no such model.
        StorageError: ``folder`` has a README.md.
    """
    file = folder / "README.md"
    if file.exists():
        raise StorageError("the file exists", where=str(file), fix="name another folder")
    with open_registered(home, model) as registered:
        text = _card(home, registered, repo)
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return file


def _errors(home: Home, tags: Mapping[str, str]) -> tuple[str, ...]:
    ref = ArtifactRef(kind="", uri=tags["artifact"], sha256=tags.get("sha256", ""), bytes=0)
    return ArtifactStore(home.root).errors(ref)


def _card(home: Home, registered: RegisteredVersion, repo: str) -> str:
    """Return the updated model card; for a model of another state directory, the card stored with its files."""
    records = read_records(home)
    record = record_of(registered.tags, records)
    if record is not None:
        tags = registered.tags
        version = int(tags["version"])
        return write_card(home, records, record, name=tags["name"], version=version, tags=tags, repo=repo).text
    beside = registered.folder.parent / CARD
    return beside.read_text(encoding="utf-8") if beside.is_file() else ""


_REPO = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/\w(?:[\w.-]{0,94}\w)?", re.ASCII)
_LOGIN = "run hf auth login, or set HF_TOKEN to a token that may write"


def check_target(repo: str, *, needs_token: bool) -> None:
    """Check name and token before any work.

    Raises:
        ConfigError: ``repo`` is no name of a repository, or there is no token although it is needed.
    """
    from huggingface_hub import get_token

    if not _REPO.fullmatch(repo) or "--" in repo or ".." in repo:
        raise ConfigError(f"{repo!r} is no name of a repository", where="--push", fix="write owner/name")
    if needs_token and not get_token():
        raise ConfigError("there is no token for the hub", where="--push", fix=_LOGIN)


def push_folder(folder: Path, repo: str, *, private: bool) -> str:
    """Upload a folder as one commit; return the commit's address. A repository that exists keeps its visibility.

    Raises:
        ServiceError: the hub refuses, or does not answer; the folder stays.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        api.create_repo(repo, private=private, exist_ok=True)
        return str(api.upload_folder(repo_id=repo, folder_path=folder, commit_message="Export by rlcore").commit_url)
    except Exception as error:
        status = getattr(getattr(error, "response", None), "status_code", 0)
        fix = f"{_LOGIN}; then: " if status in (401, 403) else ""
        why = f"{error} {error.__cause__ or ''}".strip()
        raise ServiceError(
            f"the upload failed: {why}", where=f"{api.endpoint}/{repo}", fix=f"{fix}hf upload {repo} {folder}"
        ) from error

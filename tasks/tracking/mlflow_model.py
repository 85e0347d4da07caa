"""Checkpoint as an MLflow model in its transformers flavor, with the task of a chat.

``model/`` has the checkpoint as hard links to the stage's artifact if both are on one disk, so that weights are stored
once. Next to it is the artifact's manifest, whose digest is a tag of the version: imports verify each file with it.
MLflow's server and ``pyfunc`` accept OpenAI's messages, render the chat template and answer greedily; ``temperature``
has no effect there.

Files of runs are links too (:func:`log_files`): what is logged must not be changed afterwards, but may be removed or
replaced.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlparse

from rlcore.errors import ModelError, StorageError
from rlcore.tasks.store.artifacts import MANIFEST, file_errors, listed_files
from rlcore.tasks.store.storage import file_sha256, link_or_copy

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import LoggedModel

CARD = "model_card.md"
CLEANED = "cleaned"
"""Tag of a version whose weights were removed, with the date."""
PACKAGE = "package"
"""Tag of a version with the digest of its files beside the weights."""
PAST = "past"
"""Name of the folder of a version's record of data, and of the tag with the record's digest."""
_MLMODEL, _LICENSE = "MLmodel", "LICENSE.txt"
_CHECKPOINT, _TOKENIZER = "model", "components/tokenizer"  # MLflow's names for the two
# Not in that digest: what has its own, the card, which later results change, and MLflow's note of a download.
_OTHERS = (_CHECKPOINT, PAST, CARD, "registered_model_meta")
WEIGHTS = (_CHECKPOINT, "components")
"""Folders of a version with what its artifact has too; its cards and records are beside them."""
_WEIGHTS = ".safetensors"
_LIBRARIES = ("mlflow", "torch", "transformers", "accelerate", "safetensors", "tokenizers")
_QUESTION = {"messages": [{"role": "user", "content": "3 + 4 = ?"}], "max_tokens": 32}
# Settings of MLflow's server, which cannot request greedy decoding. The template writes the BOS token itself.
_ANSWERS = {"do_sample": False, "max_new_tokens": 256, "add_special_tokens": False}


@dataclass(frozen=True, kw_only=True)
class Card:
    """Card of a model: Markdown with a YAML header."""

    text: str
    license_id: str


@dataclass(frozen=True, kw_only=True)
class Package:
    """Model to register: the checkpoint's folder, its card, and ``facts`` for MLflow's record.

    ``beside``: additional files, by their paths in the package.
    """

    checkpoint: Path
    card: Card
    facts: Mapping[str, str] = field(default_factory=dict)
    beside: Mapping[str, Path] = field(default_factory=dict)


def is_chat_model(checkpoint: Path) -> bool:
    """Return True if a folder has a language model with its tokenizer, and no head of a reward model."""
    from rlcore.models.saving import HEAD_FILE  # brings torch, which a plan of cached stages does not need

    return (checkpoint / "tokenizer.json").is_file() and not (checkpoint / HEAD_FILE).is_file()


def write_package(package: Package, name: str, folder: Path, model: LoggedModel) -> None:
    """Write the model ``name`` into the new folder ``folder``, atomically.

    A model that is no chat model is written as plain files next to its card.
    Raises:
        StorageError: ``folder`` exists, or writing fails.
    """
    from rlcore.models.saving import atomic_folder

    with atomic_folder(folder) as temporary:
        if is_chat_model(package.checkpoint):
            _write_flavor(package, name, temporary, model)
        else:
            _link(files_below(package.checkpoint), temporary / _CHECKPOINT)
        _link(package.beside, temporary)
        (temporary / _LICENSE).write_text(_license_text(package.card.license_id), encoding="utf-8")
        (temporary / CARD).write_text(package.card.text, encoding="utf-8")  # MLflow omits the header


def package_sha256(folder: Path) -> str:
    """Return the digest of a package's files beside the weights: MLflow's own, the tokenizer, the card of the data."""
    files = files_below(folder).items()
    listed = [(name, file_sha256(path)) for name, path in files if name.partition("/")[0] not in _OTHERS]
    return hashlib.sha256(json.dumps(listed).encode()).hexdigest()


def require_files(uri: str, tags: Mapping[str, str]) -> None:
    """Refuse a version whose files were cleaned.

    Raises:
        ModelError: with the command that trains it again.
    """
    if CLEANED in tags:
        raise ModelError(
            f"its files were cleaned: {tags[CLEANED]}",
            where=uri,
            fix=f"take a version that has its files, or train again: rlcore run {tags.get('preset', '')}".rstrip(),
        )


def checkpoint_in(folder: Path) -> Path:
    """Return the checkpoint in the downloaded files of any registered model.

    MLflow separates tokenizer and weights of models that it saves; they are joined here.
    """
    if not (folder / _MLMODEL).is_file():
        return folder / _CHECKPOINT if (folder / _CHECKPOINT).is_dir() else folder
    checkpoint, tokenizer = folder / _CHECKPOINT, folder / _TOKENIZER
    _link({name: path for name, path in files_below(tokenizer).items() if not (checkpoint / name).exists()}, checkpoint)
    return checkpoint


def verified_checkpoint(folder: Path, *, sha256: str, manifest: Path, uri: str) -> Path:
    """Return the checkpoint in the downloaded files of ``uri``, a version of rlcore, after verifying all files.

    ``sha256``: the artifact's, from the version's tags; ``manifest``: a copy in case that the downloaded files have
    none.
    Raises:
        ModelError: names the first file that is damaged, missing or new; or there is no manifest to compare with.
    """
    beside = folder / MANIFEST
    try:
        listed = listed_files(beside if beside.is_file() else manifest, sha256)
    except StorageError as error:
        raise ModelError(
            f"its files cannot be compared with the digest {sha256[:12]} that was registered: {error.what}",
            where=f"{uri}: {error.where}",
            fix="restore the folder of that artifact, or set RLCORE_HOME to the state directory that trained it",
        ) from error
    prefix = f"{_CHECKPOINT}/"
    own = {name.removeprefix(prefix): digest for name, digest in listed.items() if name.startswith(prefix)}
    checkpoint = folder / _CHECKPOINT
    if errors := file_errors(checkpoint, own):
        raise ModelError(
            f"the registered model is not what was registered: {'; '.join(errors[:4])}",
            where=uri,
            fix="restore MLflow's files of this version from a backup, or take another version",
        )
    return checkpoint


def _write_flavor(package: Package, name: str, folder: Path, model: LoggedModel) -> None:
    """Let MLflow write all but the weights, which it would copy; then link these and correct the record."""
    from huggingface_hub import ModelCard

    with warnings.catch_warnings():  # MLflow warns about its own type hints on their first import
        warnings.simplefilter("ignore")
        from mlflow.models import Model
        from mlflow.transformers import save_model

    record = Model(artifact_path=name, run_id=model.source_run_id, model_id=model.model_id)
    files = files_below(package.checkpoint)
    with tempfile.TemporaryDirectory() as light:
        _link({each: path for each, path in files.items() if path.suffix != _WEIGHTS}, Path(light))
        save_model(
            light,
            str(folder),
            task="llm/v1/chat",
            mlflow_model=record,
            model_card=ModelCard(package.card.text),
            input_example=_QUESTION,
            pip_requirements=_requirements(),
            model_config=_ANSWERS,
            metadata=dict[str, Any](package.facts),
        )
    _link(files, folder / _CHECKPOINT)
    tokenizer = folder / _TOKENIZER
    _link({each: path for each, path in files.items() if (tokenizer / each).exists()}, tokenizer)
    record.flavors["transformers"]["source_model_name"] = name  # otherwise the record names the temporary folder
    record.model_size_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    record.save(str(folder / _MLMODEL))


@cache
def _requirements() -> tuple[str, ...]:
    installed = {each.name.lower() for each in metadata.distributions() if each.name}
    return tuple(f"{each}=={metadata.version(each)}" for each in _LIBRARIES if each in installed)


def files_below(folder: Path) -> dict[str, Path]:
    """Return the files of a folder by their relative paths."""
    return {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}


def _link(files: Mapping[str, Path], target: Path) -> None:
    for name, path in files.items():
        link_or_copy(path, target / name)


def _license_text(name: str) -> str:
    text = f"The declared license of the base model: {name}." if name else "No license was declared."
    return f"{text}\nA model trained from it is a derived work: its terms apply here too.\n"


def log_files(client: MlflowClient, run_id: str, path: Path, folder: str) -> None:
    """Add a file, or all files of a folder, to a run's ``folder``."""
    location = local_path(client.get_run(run_id).info.artifact_uri)
    if location is not None:
        _replace(files_below(path) if path.is_dir() else {path.name: path}, location / folder)
    else:
        (client.log_artifacts if path.is_dir() else client.log_artifact)(run_id, str(path), folder)


def local_path(location: str) -> Path | None:
    """Return the path of a location of MLflow; None if a server has it."""
    parsed = urlparse(location)
    return Path(unquote(parsed.path)) if parsed.scheme == "file" else None


def _replace(files: Mapping[str, Path], target: Path) -> None:
    for name, path in files.items():
        place = target / name
        aside = place.with_name(f".{place.name}.new")  # a kill leaves it for the next start to remove
        link_or_copy(path, aside)
        aside.replace(place)
        aside.unlink(missing_ok=True)  # rename leaves it if both are names of one file

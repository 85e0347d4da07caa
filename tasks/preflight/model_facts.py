"""Facts of a run's starting model, found from its files before anything is loaded.

Finding them takes most of a plan's time, so they are remembered as long as files, code and packages are the same.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import date
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcore.config import ModelConfig, to_dict
from rlcore.config.data import FILE_SOURCES
from rlcore.errors import ModelError, RlcoreError
from rlcore.hardware.memory_plan import ModelSize
from rlcore.models.files import find_package_file
from rlcore.strict_config import build
from rlcore.tasks.kinds.kind import IMPORT
from rlcore.tasks.preflight.model_checks import source_errors
from rlcore.tasks.presets.run import RunConfig
from rlcore.tasks.steps.base import MODEL
from rlcore.tasks.store.artifacts import ArtifactRef
from rlcore.tasks.store.code_hash import installations, package_digest
from rlcore.tasks.store.remembered import remembered
from rlcore.tasks.store.settings import Home
from rlcore.tasks.store.storage import file_sha256

if TYPE_CHECKING:
    from rlcore.text.tokenization import ChatTokenizer

_MOST_HASHED = 1 << 26  # bytes; a larger file has weights, and no fact depends on more than its header


@dataclass(frozen=True, kw_only=True)
class ModelFiles:
    """Files of a starting model: its source as JSON, and a digest of everything that is read from it."""

    source: str
    digest: str = ""

    def tokenizer(self) -> ChatTokenizer:
        """Load the tokenizer, or raise a ModelError that says why there is none."""
        return _tokenizer(self)


@lru_cache(maxsize=4)  # to read a GGUF file takes seconds
def _tokenizer(files: ModelFiles) -> ChatTokenizer:
    from rlcore.models.preview import preview_tokenizer  # brings transformers
    from rlcore.text.tokenization import ChatTokenizer

    named = json.loads(files.source)
    if "folder" in named:
        return ChatTokenizer.load(named["folder"])
    found = preview_tokenizer(build(ModelConfig, named["model"]))
    assert found is not None  # as its facts say
    return found


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """Facts of a starting model that is on this machine and can be read; else the defaults.

    ``size``: of its shape. ``positions``: that it reads. ``prefill``: what its template writes before a completion.
    ``files``: those of its tokenizer, None if there is none yet. ``error``: why it cannot be trained.
    """

    size: ModelSize | None = None
    positions: int | None = None
    prefill: str = ""
    files: ModelFiles | None = None
    error: ModelError | None = None


def model_facts(config: RunConfig, home: Home, refs: Mapping[str, ArtifactRef]) -> ModelFacts:
    """Return the facts of the base; ``refs``: artifacts of the stages that do not run, among them its import."""
    try:
        files = _files(config.model, home, refs)
        found = _facts(files.source, files.digest, code_state()) if files else {}
    except (RlcoreError, OSError, ValueError):  # a damaged folder of the state directory
        return ModelFacts()
    size = found.get("size")
    return ModelFacts(
        size=ModelSize(**_shape(size)) if size else None,
        positions=found.get("positions"),
        prefill=found.get("prefill", ""),
        files=files if found.get("has_tokenizer") else None,
        error=ModelError(**found["error"]) if found.get("error") else None,
    )


def code_state() -> str:
    """Return a text that changes with the code of rlcore and with each installed package."""
    return f"{package_digest()}\n{installations()}"


def _files(model: ModelConfig, home: Home, refs: Mapping[str, ArtifactRef]) -> ModelFiles | None:
    if IMPORT in refs:
        folder = home.root / refs[IMPORT].uri / MODEL
        return ModelFiles(source=json.dumps({"folder": str(folder)}), digest=refs[IMPORT].sha256)
    if any(source_errors(model)) and not Path(model.path).exists():
        return None
    known = replace(model, chat_template=model.chat_template if Path(model.chat_template).is_file() else "")
    return ModelFiles(source=json.dumps({"model": to_dict(known)}), digest=_digest(_read_files(known)))


def _read_files(model: ModelConfig) -> list[Path]:
    files = [Path(model.chat_template)] if model.chat_template else []
    if model.source == "package":
        return [*files, find_package_file(model.path, model.file)]
    path = Path(model.path)
    return files + (sorted((path, *path.glob("*"))) if model.source in FILE_SOURCES else [])


def _digest(files: Iterable[Path]) -> str:
    """Return a digest of files, by their content or, if large, size and time, and of the date that templates write."""
    lines = [date.today().isoformat()]
    for path in files:
        state = path.stat()
        is_hashed = path.is_file() and state.st_size <= _MOST_HASHED
        content = file_sha256(path) if is_hashed else f"{state.st_mode} {state.st_size} {state.st_mtime_ns}"
        lines.append(f"{path} {content}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


@remembered
def _facts(source: str, digest: str, code: str) -> dict[str, Any]:
    """Return :class:`ModelFacts` as JSON."""
    from rlcore.models.architectures import max_positions  # brings transformers
    from rlcore.models.preview import model_size, preview_config

    found: dict[str, Any] = {"size": None, "positions": None, "prefill": "", "has_tokenizer": False, "error": None}
    named = json.loads(source)
    try:
        model = build(ModelConfig, named["model"]) if "model" in named else None
        config = preview_config(model or ModelConfig(source="folder", path=named["folder"]))
        if config is None:
            return found
        size = model_size(config)
        found["positions"] = max_positions(config)
        found["size"] = to_dict(replace(size, adaptable=tuple(sorted(size.adaptable))))  # type: ignore[arg-type]  # JSON
        if model is None or model.source != "scratch":
            tokenizer = ModelFiles(source=source, digest=digest).tokenizer()
            found |= {"prefill": tokenizer.prefill, "has_tokenizer": True}
    except ModelError as error:
        found["error"] = {"what": error.what, "where": error.where, "fix": error.fix}
    return found


def _shape(size: Mapping[str, Any]) -> dict[str, Any]:
    linear = tuple((name, inputs, outputs) for name, inputs, outputs in size["linear"])
    return {**size, "linear": linear, "adaptable": frozenset(size["adaptable"])}

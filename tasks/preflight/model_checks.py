"""Starting model of a run: its facts, found from its files before anything is loaded, and their checks.

Finding them takes most of a plan's time, so they are remembered as long as files, code and packages are the same.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import date
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcore.config import EngineConfig, HardwareConfig, ModelConfig, to_dict
from rlcore.config.data import FILE_SOURCES
from rlcore.errors import ConfigError, ModelError, RlcoreError
from rlcore.extras import install_command
from rlcore.hardware.memory_plan import ModelSize
from rlcore.models.files import find_package_file
from rlcore.sampling.vllm.process import ADAPTER_RANKS
from rlcore.strict_config import build
from rlcore.tasks.keys.machine import known_machine
from rlcore.tasks.kinds.kind import IMPORT
from rlcore.tasks.presets.graph import rl_of
from rlcore.tasks.presets.run import RunConfig, collect_error
from rlcore.tasks.steps.base import MODEL
from rlcore.tasks.store.artifacts import ArtifactRef
from rlcore.tasks.store.code_hash import installations, package_digest
from rlcore.tasks.store.remembered import remembered
from rlcore.tasks.store.settings import Home
from rlcore.tasks.store.storage import file_sha256, flatten

if TYPE_CHECKING:
    from rlcore.text.tokenization import ChatTokenizer


_LORAS = ("update.lora", "lora", "backbone.lora")  # of the kinds of stages that have some
_MOST_HASHED = 1 << 26  # bytes; a larger file has weights, and no fact depends on more than its header
_COMMIT = re.compile(r"[0-9a-f]{40}")
_EXTRAS: Mapping[str, tuple[str, ...]] = {
    "lora": ("peft",),
    "bnb": ("bitsandbytes",),
    "gguf": ("gguf", "accelerate"),
    "ray": ("ray",),
}
"""Packages of the extras that settings need; stages, environments and rewards check their own."""


def source_errors(config: ModelConfig) -> Iterator[str]:
    """Yield errors of the model's source: a revision that may move, files that are not there."""
    path = Path(config.path)
    if config.source == "hub" and not _COMMIT.fullmatch(config.revision):
        yield (
            f"model.revision = {config.revision!r}: not a commit; name the 40 hexadecimal digits of one, since "
            "branches and tags can be moved"
        )
    if config.source == "folder" and not (path / "config.json").is_file():
        yield f"model.path = {config.path!r}: there is no model in this folder; it needs a config.json"
    if config.source == "gguf" and not path.is_file():
        yield f"model.path = {config.path!r}: no such file"
    if config.source == "package":
        yield from collect_error("model.path", lambda: find_package_file(config.path, config.file))
    if config.chat_template and not Path(config.chat_template).is_file():
        yield f"model.chat_template = {config.chat_template!r}: no such file; leave it out to take the model's own"


def extras_errors(config: RunConfig, stages: Collection[str], *, is_imported: bool) -> Iterator[str]:
    """Yield the settings that need packages of an extra that is not installed."""
    for key, extra in _needed(config, stages, is_imported=is_imported).items():
        missing = [package for package in _EXTRAS[extra] if find_spec(package) is None]
        if missing:
            yield f"{key}: needs {' and '.join(missing)}, not installed here; {install_command(extra)}"


def target_errors(config: RunConfig, stages: Collection[str], size: ModelSize | None) -> Iterator[str]:
    """Yield the targets of LoRA that the model does not have, if its shape is known."""
    if size is None:
        return
    for name in stages:
        for place in _LORAS:
            lora = _at(config.stages[name].settings, place)
            unknown = sorted(set(lora.targets) - size.adaptable) if lora and lora.rank else []
            if unknown:
                yield (
                    f"stages.{name}.{place}.targets: the model has no linear layer {', '.join(unknown)} that LoRA can "
                    f"change; choose among {', '.join(sorted(size.adaptable)) or 'none: set rank = 0'}"
                )


def adapter_errors(config: RunConfig, stages: Collection[str]) -> Iterator[str]:
    """Yield the LoRA stages whose engine would compute in half precision with merged weights.

    There a small step of the adapter rounds back to the base, and the engine would sample from the start.
    """
    for name in stages:
        rl = rl_of(config.stages[name])
        if rl is None or not rl.update.lora.rank:
            continue
        engine = config.engine_of(rl.sampling)
        dtype = _precision(config.hardware) if engine.dtype == "auto" else engine.dtype
        fixes = list(_to_send_adapter(engine, rl.update.lora.rank, config.distributed.backend))
        if fixes and dtype != "float32":
            yield (
                f"stages.{name}.update.lora.rank = {rl.update.lora.rank}: the engine would get merged weights in "
                f"{'half precision' if dtype == 'auto' else dtype}, whose rounding loses small steps of LoRA; to send "
                f"the adapter itself, set {' and '.join(fixes)}; or set hardware.dtype = 'float32' and engine.dtype = "
                "'auto'"
            )


def _to_send_adapter(engine: EngineConfig, rank: int, backend: str) -> Iterator[str]:
    if engine.kind == "native":  # float32 for a LoRA
        return
    if engine.urls:
        yield "engine.urls = []"
    if rank > ADAPTER_RANKS[-1]:
        yield f"update.lora.rank to at most {ADAPTER_RANKS[-1]}"
    if backend != "local":  # ranks export merged weights
        yield "distributed.backend = 'local'"


def _precision(hardware: HardwareConfig) -> str:
    try:
        precision: str = known_machine(hardware).facts["precision"]
    except ConfigError:  # reported as an error of hardware.device: the preset is for another machine
        return hardware.dtype
    return precision


def _at(settings: Any, place: str) -> Any:
    for part in place.split("."):
        settings = getattr(settings, part, None)
    return settings


def _needed(config: RunConfig, stages: Collection[str], *, is_imported: bool) -> dict[str, str]:
    needed = {}
    if config.model.source in ("gguf", "package") and not is_imported:
        needed[f"model.source = {config.model.source!r}"] = "gguf"
    if config.distributed.backend == "ray":
        needed["distributed.backend = 'ray'"] = "ray"
    for name in stages:
        for key, value in flatten(to_dict(config.stages[name].settings)).items():
            if key.endswith("lora.rank") and value:
                needed[f"stages.{name}.{key} = {value}"] = "lora"
            if key.endswith("optim.kind") and value == "adamw_8bit":
                needed[f"stages.{name}.{key} = {value!r}"] = "bnb"
    return needed


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

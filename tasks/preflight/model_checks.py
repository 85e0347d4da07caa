"""Checks of the starting model before a run: source, tokenizer, chat template, EOS token, packages of extras."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlcore.config import EngineConfig, HardwareConfig, ModelConfig, to_dict
from rlcore.errors import ConfigError
from rlcore.extras import install_command
from rlcore.hardware.memory_plan import ModelSize
from rlcore.models.files import find_package_file
from rlcore.sampling.vllm.process import ADAPTER_RANKS
from rlcore.tasks.keys.machine import known_machine
from rlcore.tasks.presets.graph import rl_of
from rlcore.tasks.presets.run import RunConfig, collect_error
from rlcore.tasks.store.storage import flatten

_LORAS = ("update.lora", "lora", "backbone.lora")  # of the kinds of stages that have some
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

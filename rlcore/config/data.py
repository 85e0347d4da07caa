"""Settings of the starting checkpoint and of the machine."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Annotated, Literal

from rlcore.errors import ConfigError
from rlcore.strict_config import PositiveInt, Scalar, between

FILE_SOURCES = ("folder", "gguf")
"""Values of ``source`` for which ``path`` names files."""
_GIVEN = ("messages", "add_generation_prompt", "tools", "documents")  # variables that the pipeline sets
_DEVICE = re.compile(r"auto|cpu|cuda(:(0|[1-9]\d*))?")


@dataclass(frozen=True, kw_only=True)
class HardwareConfig:
    """Device and precision. :mod:`rlcore.hardware.machine` resolves ``auto``."""

    device: str = "auto"  # `auto` (CUDA if present), `cpu`, `cuda`, or one GPU, such as `cuda:1`
    # of matrix products; `auto`: float32 on a CPU, bfloat16 on CUDA (float16 on a GPU without bfloat16 units)
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    num_threads: Annotated[int, between(0, 1024)] = 0  # CPU threads of torch; 0: its default
    # recompute activations in the backward pass: less memory, about a third more time
    gradient_checkpointing: bool = False
    # write checkpoints of SFT and RL in float32 even if the starting checkpoint is in half precision
    save_float32: bool = False

    def __post_init__(self) -> None:
        if not _DEVICE.fullmatch(self.device):
            raise ConfigError(f"device = {self.device!r} must be one of 'auto', 'cpu', 'cuda', 'cuda:0', 'cuda:1', …")


@dataclass(frozen=True, kw_only=True)
class ShapeConfig:
    """Shape of a new Llama (``model.source = "scratch"``)."""

    hidden_size: PositiveInt = 192  # width of the residual stream; a multiple of 2 * num_heads
    num_layers: PositiveInt = 4  # transformer layers
    num_heads: PositiveInt = 6  # attention heads
    num_kv_heads: PositiveInt = 6  # key-value heads; a divisor of num_heads
    intermediate_size: PositiveInt = 512  # width of the MLP
    max_positions: PositiveInt = 256  # longest sequence in tokens

    def __post_init__(self) -> None:
        if self.hidden_size % (2 * self.num_heads):
            raise ConfigError("hidden_size must be a multiple of 2 * num_heads (rotary positions pair dimensions)")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError("num_heads must be a multiple of num_kv_heads")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The starting checkpoint. It and all models trained from it keep template and control tokens."""

    # `scratch`: a new Llama of `shape`; `hub`, `folder`, `gguf`: from `path`; `package`: `file` (a GGUF) in an
    # installed Python package; `registry`: an MLflow model
    source: Literal["scratch", "hub", "folder", "gguf", "package", "registry"]
    path: str = ""  # hub: `org/name`; folder, gguf: the path; package: its import name; registry: a model URI
    revision: str = ""  # of a hub model: a 40-hex commit
    file: str = ""  # with `package`: the GGUF file in it
    license: str = ""  # recorded in the model card, such as `Apache-2.0`
    chat_template: str = ""  # path of a Jinja file; empty: the model's own
    # variables of the chat template, such as `enable_thinking = false`
    chat_template_kwargs: Mapping[str, Scalar] = field(default_factory=dict)
    # date (`2026-11-25`) for templates that use one; empty: the date recorded with the model, or the import date
    template_date: str = ""
    # control tokens that end a completion besides the declared ones, such as `<|im_end|>` of a base model's template
    extra_eos: tuple[str, ...] = ()
    system_prompt: str = ""  # system prompt of datasets that set none
    shape: ShapeConfig = field(default_factory=ShapeConfig)

    def __post_init__(self) -> None:
        if self.source != "scratch" and not self.path:
            raise ConfigError(f"path is required with source = {self.source!r}")
        for name in self.chat_template_kwargs:
            if not name.isidentifier() or name in _GIVEN:
                raise ConfigError(f"chat_template_kwargs.{name}: presets cannot set this variable")
        try:
            _ = self.template_date and date.fromisoformat(self.template_date)
        except ValueError:
            raise ConfigError(f"template_date = {self.template_date!r} must be a date such as '2026-11-25'") from None

    @property
    def files(self) -> dict[str, str]:
        """Paths of files and folders, by key."""
        named = {"path": self.path if self.source in FILE_SOURCES else "", "chat_template": self.chat_template}
        return {key: path for key, path in named.items() if path}

    @property
    def without_folders(self) -> ModelConfig:
        """Copy without folders in its paths: cache keys count the content of files, not their location."""
        path = Path(self.path).name if self.source in FILE_SOURCES else self.path
        return replace(self, path=path, chat_template=Path(self.chat_template).name)


def tried(path: str) -> str:
    """Return the absolute path of a missing file, with the folders that relative paths start at."""
    return f"{Path(path).absolute()} (relative paths start at the preset's own file, those of --set at {Path.cwd()})"

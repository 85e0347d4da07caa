"""Settings of where a model comes from, and of the machine."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Literal

from rlcore.config.bounds import NonNegativeInt, PositiveInt, Scalar
from rlcore.errors import ConfigError

FILE_SOURCES = ("folder", "gguf")
"""The sources of a model whose path names files."""
_GIVEN = ("messages", "add_generation_prompt", "tools", "documents")  # what the pipeline gives a chat template
_DEVICE = re.compile(r"auto|cpu|cuda(:(0|[1-9]\d*))?")


@dataclass(frozen=True, kw_only=True)
class HardwareConfig:
    """Where and in which precision to compute; what ``auto`` becomes, :mod:`rlcore.hardware.machine` decides.

    ``device``: ``auto`` (CUDA if present), ``cpu``, ``cuda``, or one card by its number, ``cuda:1``. ``dtype``: of the
    matrix products; ``auto`` is float32 on a CPU and bfloat16 on CUDA (float16 on a card without bfloat16 units).
    ``gradient_checkpointing``: gradient checkpointing. Activations inside a learning model's layers are not kept but
    computed again in the backward pass: less memory, about a third more time. ``save_float32``: write checkpoints of
    SFT and RL in float32, even if the starting checkpoint and the products are in half precision.
    """

    device: str = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    num_threads: NonNegativeInt = 0  # 0: torch's default
    gradient_checkpointing: bool = False
    save_float32: bool = False

    def __post_init__(self) -> None:
        if not _DEVICE.fullmatch(self.device):
            raise ConfigError(f"device = {self.device!r} must be one of 'auto', 'cpu', 'cuda', 'cuda:0', 'cuda:1', …")


@dataclass(frozen=True, kw_only=True)
class ShapeConfig:
    """Shape of a Llama made from scratch."""

    hidden_size: PositiveInt = 192
    num_layers: PositiveInt = 4
    num_heads: PositiveInt = 6
    num_kv_heads: PositiveInt = 6
    intermediate_size: PositiveInt = 512
    max_positions: PositiveInt = 256

    def __post_init__(self) -> None:
        if self.hidden_size % (2 * self.num_heads):
            raise ConfigError("hidden_size must be a multiple of 2 * num_heads (rotary positions pair dimensions)")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError("num_heads must be a multiple of num_kv_heads")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The starting checkpoint.

    ``source``: ``scratch`` (a new Llama of ``shape``), ``hub`` (``path`` is ``org/name``, ``revision`` a 40-hex
    commit), ``folder`` (``path``), ``gguf`` (``path`` to the file), ``package`` (``path`` is an installed Python
    package that carries ``file``, a GGUF), ``registry`` (``path`` is an MLflow model URI).

    ``chat_template_kwargs``: variables of the chat template, such as ``enable_thinking = false``. ``extra_eos``:
    control tokens that end a completion, in addition to those that the model declares: ``<|im_end|>``, for example, if
    a base model's template ends turns with it. Both become a part of the imported checkpoint, and of every model
    trained from it. ``template_date``: the day (``2026-11-25``) that a template writes which asks for the date; if it
    is empty, the day that is recorded with the model, or that of the import. ``system_prompt``: the system prompt of
    the data sets that name none.
    """

    source: Literal["scratch", "hub", "folder", "gguf", "package", "registry"]
    path: str = ""
    revision: str = ""
    file: str = ""
    license: str = ""
    chat_template: str = ""  # path of a Jinja file; empty: the model's own
    chat_template_kwargs: Mapping[str, Scalar] = field(default_factory=dict)
    template_date: str = ""
    extra_eos: tuple[str, ...] = ()
    system_prompt: str = ""
    shape: ShapeConfig = field(default_factory=ShapeConfig)

    def __post_init__(self) -> None:
        if self.source != "scratch" and not self.path:
            raise ConfigError(f"path: required with source = {self.source!r}, but missing")
        for name in self.chat_template_kwargs:
            if not name.isidentifier() or name in _GIVEN:
                raise ConfigError(
                    f"chat_template_kwargs.{name}: not a variable that a preset may set in a chat template"
                )
        try:
            _ = self.template_date and date.fromisoformat(self.template_date)
        except ValueError:
            raise ConfigError(f"template_date = {self.template_date!r} must be a day such as '2026-11-25'") from None

    @property
    def files(self) -> dict[str, str]:
        """The files and folders that it names, by their keys."""
        named = {"path": self.path if self.source in FILE_SOURCES else "", "chat_template": self.chat_template}
        return {key: path for key, path in named.items() if path}

    @property
    def without_folders(self) -> ModelConfig:
        """The same, files by their names alone: keys count their content, wherever they lie."""
        path = Path(self.path).name if self.source in FILE_SOURCES else self.path
        return replace(self, path=path, chat_template=Path(self.chat_template).name)


def tried(path: str) -> str:
    """The path of a file that is not there, whole, and what relative paths are relative to."""
    return f"{Path(path).absolute()} (relative paths start at the preset's own file, those of --set at {Path.cwd()})"

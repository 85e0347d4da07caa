"""Settings of where models and data come from, and of the machine."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from rlcore.config.bounds import Fraction, NonNegativeInt, PositiveInt, Scalar
from rlcore.errors import ConfigError

POLICY = "policy"  # the adapter of pairs that a policy samples
_DEVICE = re.compile(r"auto|cpu|cuda(:(0|[1-9]\d*))?")


@dataclass(frozen=True, kw_only=True)
class HardwareConfig:
    """Where and in which precision to compute; what ``auto`` becomes, :mod:`rlcore.machine` decides.

    ``device``: ``auto`` (CUDA if present), ``cpu``, ``cuda``, or one card by its number, ``cuda:1``. ``dtype``: of the
    matrix products; ``auto`` is float32 on a CPU and bfloat16 on CUDA (float16 on a card without bfloat16 units).
    ``recompute_layers``: keep no activations inside the layers of a model that learns, and compute them a second time
    in the backward pass: less memory for about a third more time. ``save_float32``: checkpoints of SFT and RL in
    float32, as they learned, where starting checkpoint and products are in half precision and they would be too.
    """

    device: str = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    num_threads: NonNegativeInt = 0  # 0: torch's default
    recompute_layers: bool = False
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
    """

    source: Literal["scratch", "hub", "folder", "gguf", "package", "registry"]
    path: str = ""
    revision: str = ""
    file: str = ""
    licence: str = ""
    chat_template: str = ""  # path of a Jinja file; empty: the model's own
    shape: ShapeConfig = field(default_factory=ShapeConfig)


@dataclass(frozen=True, kw_only=True)
class DatasetConfig:
    """One data set: where rows come from, how many are kept, and how strict its gate is.

    ``contract`` says what a row is. ``adapter`` names the function that turns the source into contract columns;
    ``path`` is a JSONL or Parquet file, or ``hub:org/name@revision``; empty for adapters that generate their rows or
    ``policy`` (pairs sampled from the checkpoint ``policy`` and graded). When ``path`` does not exist and ``fallback``
    is set, that adapter is used instead.
    """

    contract: Literal["prompts", "code_tasks", "demonstrations", "preference_pairs"]
    adapter: str
    path: str = ""
    fallback: str = ""
    policy: str = ""
    num_train: PositiveInt
    num_eval: PositiveInt
    max_tokens: PositiveInt  # token budget of one row (prompt + completion)
    max_quarantined: Fraction = 0.01
    options: Mapping[str, Scalar] = field(default_factory=dict)

    @property
    def has_prompts(self) -> bool:
        """Whether its rows are asked of a policy; tasks for code are prompts that programs answer."""
        return self.contract in ("prompts", "code_tasks")

    @property
    def is_sampled(self) -> bool:
        """Whether its rows may be sampled from a policy of the run."""
        return POLICY in (self.adapter, self.fallback)

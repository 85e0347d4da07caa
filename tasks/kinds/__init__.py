"""Kinds of stages, one folder each.

``kind.py`` has the table of a preset and ``KIND`` (:class:`rlcore.tasks.kinds.kind.StageKind`), through which the
pipeline uses the kind, and a short page; ``step.py`` computes, and ``page.py`` renders a long page. The pipeline itself
adds the stages of folders that are not listed here. A preset may also name a table as ``module:NAME``, next to the
``KIND`` of its module. The graph of a preset needs the facts of :class:`StageConfig`.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Protocol

KINDS: Mapping[str, str] = MappingProxyType(
    {
        "sft": "rlcore.tasks.kinds.sft.kind:SftStage",
        "dpo": "rlcore.tasks.kinds.dpo.kind:DpoStage",
        "reward_model": "rlcore.tasks.kinds.reward_model.kind:RewardModelStage",
        "rl": "rlcore.tasks.kinds.rl.kind:RlStage",
        "rejection": "rlcore.tasks.kinds.rejection.kind:RejectionStage",
        "difficulty": "rlcore.tasks.kinds.difficulty.kind:DifficultyStage",
        "win_rate": "rlcore.tasks.kinds.win_rate.kind:WinRateStage",
        "benchmark": "rlcore.tasks.kinds.benchmark.kind:BenchmarkStage",
    }
)
"""The kinds that a preset may name, with their tables."""


def load(name: str) -> Any:
    """Import the object that ``module:NAME`` names, so that presets are read without the libraries of steps."""
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)


def table_name(kind: str) -> str:
    """Return the table of a kind as ``module:NAME``, which the kinds of others are called.

    Raises:
        KeyError: there is no such kind.
    """
    return kind if ":" in kind else KINDS[kind]


BASE = "base"
"""The checkpoint that a run begins with, as stages name it."""

Product = Literal["checkpoint", "reward_model", "demonstrations", "measurements"]
Rows = Literal["demonstrations", "preference pairs", "prompts"]
PRODUCTS: Mapping[Product, str] = MappingProxyType(
    {
        "checkpoint": "a checkpoint",
        "reward_model": "a reward model",
        "demonstrations": "demonstrations",
        "measurements": "measurements",
    }
)
"""Products of stages, as messages name them."""


class StageConfig(Protocol):
    """Preset table of a stage: a frozen dataclass whose keys appear next to those of its ``settings``.

    The graph reads facts of its class. ``produces``: the product. ``consumes``: the rows that it needs. ``data_key``:
    the key that names their datasets, as a list or a table of mixture weights; empty if it reads none. ``is_compared``:
    the comparison covers more of it than its evaluation. Fields of the settings tell the rest: ``sampling`` samples,
    ``rewards`` scores, ``judge`` compares, ``critic`` trains a critic, ``algorithm`` is RL. Either ``init_from`` or
    ``policy`` names the checkpoint that it begins with.
    """

    produces: ClassVar[Product]
    consumes: ClassVar[Rows]
    data_key: ClassVar[str]
    is_compared: ClassVar[bool]

    @property
    def kind(self) -> str: ...
    @property
    def settings(self) -> Any: ...

"""Facts about stage kinds that the graph of a preset needs: products, rows, data keys."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Protocol

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

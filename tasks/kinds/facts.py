"""Facts of kinds of stages that the graph of a preset needs: products, rows, data keys."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Protocol

BASE = "base"
"""The checkpoint that a run begins with, as stages name it."""

Product = Literal["checkpoint", "reward_model", "demonstrations", "win_rate", "difficulty", "benchmark"]
Rows = Literal["demonstrations", "preference pairs", "prompts"]
PRODUCTS: Mapping[Product, str] = MappingProxyType(
    {
        "checkpoint": "a checkpoint",
        "reward_model": "a reward model",
        "demonstrations": "demonstrations",
        "win_rate": "a win rate",
        "difficulty": "pass rates of prompts",
        "benchmark": "a benchmark",
    }
)
"""What stages make, as messages name it."""


class StageConfig(Protocol):
    """The table of a stage in a preset: a frozen dataclass, whose keys stand beside those of its ``settings``.

    The graph reads facts of its class: ``produces``, the product; ``consumes``, the rows that it needs; ``data_key``,
    the key under which it names their datasets, a list or a table of mixture weights, and empty if it reads none;
    ``is_compared``, whether the comparison tells of it beside its evaluation. What the settings have says the rest:
    ``sampling``, that it samples; ``rewards``, that it scores; ``judge``, that it compares; ``critic``, that it trains
    one; ``algorithm``, that it learns by RL. Either ``init_from`` or ``policy`` names the checkpoint that it begins
    with.
    """

    produces: ClassVar[Product]
    consumes: ClassVar[Rows]
    data_key: ClassVar[str]
    is_compared: ClassVar[bool]

    @property
    def kind(self) -> str: ...
    @property
    def settings(self) -> Any: ...

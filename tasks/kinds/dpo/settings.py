"""Preset table of direct preference optimization."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from rlcore.config.training import DpoConfig
from rlcore.strict_config import INLINE
from rlcore.tasks.kinds.facts import Product, Rows


@dataclass(frozen=True, kw_only=True)
class DpoStage:
    """Direct preference optimization. ``data``: datasets of preference pairs."""

    produces: ClassVar[Product] = "checkpoint"
    consumes: ClassVar[Rows] = "preference pairs"
    data_key: ClassVar[str] = "data"
    is_compared: ClassVar[bool] = False
    kind: Literal["dpo"]
    init_from: str
    data: tuple[str, ...]
    settings: DpoConfig = field(metadata=INLINE)

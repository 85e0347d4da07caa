"""Preset table of supervised fine-tuning."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from rlcore.config.training import SftConfig
from rlcore.strict_config import INLINE
from rlcore.tasks.kinds.facts import Product, Rows


@dataclass(frozen=True, kw_only=True)
class SftStage:
    """Supervised fine-tuning. ``data``: datasets of demonstrations, or stages that make them."""

    produces: ClassVar[Product] = "checkpoint"
    consumes: ClassVar[Rows] = "demonstrations"
    data_key: ClassVar[str] = "data"
    is_compared: ClassVar[bool] = False
    kind: Literal["sft"]
    init_from: str
    data: tuple[str, ...]
    settings: SftConfig = field(metadata=INLINE)

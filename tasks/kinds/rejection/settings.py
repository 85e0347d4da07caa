"""Preset table of rejection sampling."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from rlcore.config.rejection import RejectionConfig
from rlcore.strict_config import INLINE
from rlcore.tasks.kinds.facts import Product, Rows


@dataclass(frozen=True, kw_only=True)
class RejectionStage:
    """Rejection sampling from ``policy`` on the training prompts of ``data``."""

    produces: ClassVar[Product] = "demonstrations"
    consumes: ClassVar[Rows] = "prompts"
    data_key: ClassVar[str] = "data"
    is_compared: ClassVar[bool] = True
    kind: Literal["rejection"]
    policy: str
    data: tuple[str, ...]
    settings: RejectionConfig = field(metadata=INLINE)

"""Preset table of a difficulty stage."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from rlcore.config.rejection import AnswersConfig
from rlcore.strict_config import INLINE
from rlcore.tasks.kinds.facts import Product, Rows


@dataclass(frozen=True, kw_only=True)
class DifficultyStage:
    """Pass rate of ``policy`` on each training prompt of ``data``, for the curriculum of RL stages."""

    produces: ClassVar[Product] = "measurements"
    consumes: ClassVar[Rows] = "prompts"
    data_key: ClassVar[str] = "data"
    is_compared: ClassVar[bool] = False
    kind: Literal["difficulty"]
    policy: str
    data: tuple[str, ...]
    settings: AnswersConfig = field(metadata=INLINE)

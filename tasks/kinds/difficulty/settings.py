"""The table of a preset for the measurement of pass rates."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from rlcore.config.rejection import AnswersConfig
from rlcore.strict import INLINE
from rlcore.tasks.kinds.facts import Product, Rows


@dataclass(frozen=True, kw_only=True)
class DifficultyStage:
    """How often ``policy`` solves each training prompt of ``data``: what RL stages can draw by."""

    produces: ClassVar[Product] = "difficulty"
    consumes: ClassVar[Rows] = "prompts"
    data_key: ClassVar[str] = "data"
    is_compared: ClassVar[bool] = False
    kind: Literal["difficulty"]
    policy: str
    data: tuple[str, ...]
    settings: AnswersConfig = field(metadata=INLINE)

"""Preset table of a win rate."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from rlcore.config.win_rate import WinRateConfig
from rlcore.strict_config import INLINE
from rlcore.tasks.kinds.facts import Product, Rows


@dataclass(frozen=True, kw_only=True)
class WinRateStage:
    """Preference for answers of ``policy`` over those of ``baseline`` on the held-out prompts of ``data``.

    ``human_pairs``: datasets of preference pairs whose held-out rows audit the judge; empty: no audit.
    """

    produces: ClassVar[Product] = "measurements"
    consumes: ClassVar[Rows] = "prompts"
    data_key: ClassVar[str] = "data"
    is_compared: ClassVar[bool] = True
    kind: Literal["win_rate"]
    policy: str
    baseline: str
    data: tuple[str, ...]
    human_pairs: tuple[str, ...] = ()
    settings: WinRateConfig = field(metadata=INLINE)

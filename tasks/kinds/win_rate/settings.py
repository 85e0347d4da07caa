"""The table of a preset for a win rate."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from rlcore.config.win_rate import WinRateConfig
from rlcore.strict import INLINE
from rlcore.tasks.kinds.facts import Product, Rows


@dataclass(frozen=True, kw_only=True)
class WinRateStage:
    """How often the answers of ``policy`` are preferred to those of ``baseline``, on the held-out prompts of ``data``.

    ``human_pairs``: data sets of preference pairs, on whose held-out rows the judge is audited; none: not audited.
    """

    produces: ClassVar[Product] = "win_rate"
    consumes: ClassVar[Rows] = "prompts"
    data_key: ClassVar[str] = "data"
    is_compared: ClassVar[bool] = True
    kind: Literal["win_rate"]
    policy: str
    baseline: str
    data: tuple[str, ...]
    human_pairs: tuple[str, ...] = ()
    settings: WinRateConfig = field(metadata=INLINE)

"""The table of a preset for the training of a reward model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from rlcore.config.training import RewardModelConfig
from rlcore.strict import INLINE
from rlcore.tasks.kinds.facts import Product, Rows


@dataclass(frozen=True, kw_only=True)
class RewardModelStage:
    """Training of a reward model. ``data``: data sets of preference pairs.

    ``gold_pairs``: data sets of pairs whose winners are known. It trains on none of them, and has to tell them.
    """

    produces: ClassVar[Product] = "reward_model"
    consumes: ClassVar[Rows] = "preference pairs"
    data_key: ClassVar[str] = "data"
    is_compared: ClassVar[bool] = True
    kind: Literal["reward_model"]
    init_from: str
    data: tuple[str, ...]
    gold_pairs: tuple[str, ...] = ()
    settings: RewardModelConfig = field(metadata=INLINE)

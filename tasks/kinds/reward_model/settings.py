"""Preset table of reward-model training."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from rlcore.config.training import RewardModelConfig
from rlcore.strict_config import INLINE
from rlcore.tasks.kinds.facts import Product, Rows


@dataclass(frozen=True, kw_only=True)
class RewardModelStage:
    """Reward-model training. ``data``: datasets of preference pairs.

    ``gold_pairs``: datasets of pairs with known labels. They are not trained on, and the model must rank them
    correctly. ``half``: train on the pairs of one half of the prompts, with a seed of its own. A judge of a policy
    needs the half that its reward model does not train on.
    """

    produces: ClassVar[Product] = "reward_model"
    consumes: ClassVar[Rows] = "preference pairs"
    data_key: ClassVar[str] = "data"
    is_compared: ClassVar[bool] = True
    kind: Literal["reward_model"]
    init_from: str
    data: tuple[str, ...]
    gold_pairs: tuple[str, ...] = ()
    half: Literal["all", "first", "second"] = "all"
    settings: RewardModelConfig = field(metadata=INLINE)

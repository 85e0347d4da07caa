"""The table of a preset for online RL."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from rlcore.config.bounds import Fraction, PositiveFloat
from rlcore.config.rl import RlConfig
from rlcore.errors import ConfigError
from rlcore.strict import INLINE
from rlcore.tasks.kinds.facts import Product, Rows


@dataclass(frozen=True, kw_only=True)
class DrawConfig:
    """How prompts are drawn by the pass rates that the stage ``pass_rates`` has measured.

    Prompts with a pass rate from ``min_pass_rate`` to ``max_pass_rate`` are drawn, and no others; nor those that it did
    not ask. ``weighting``: ``even``, each as often as another; ``learnability``, in proportion to p(1 - p) of its pass
    rate p, as far as the number of answers tells it.
    """

    pass_rates: str
    min_pass_rate: Fraction = 0.0
    max_pass_rate: Fraction = 1.0
    weighting: Literal["even", "learnability"] = "even"

    def __post_init__(self) -> None:
        if self.min_pass_rate > self.max_pass_rate:
            raise ConfigError("min_pass_rate must not be above max_pass_rate")


@dataclass(frozen=True, kw_only=True)
class RlStage:
    """Online RL. ``prompts``: data sets of prompts, each with its share: ``{ gsm8k = 0.7, mbpp = 0.3 }``.

    ``ref_policy``: the checkpoint that KL is measured to, a teacher or the champion; left out: ``init_from``.
    ``curriculum``: how often each prompt of a data set comes; left out: all equally often.
    """

    produces: ClassVar[Product] = "checkpoint"
    consumes: ClassVar[Rows] = "prompts"
    data_key: ClassVar[str] = "prompts"
    is_compared: ClassVar[bool] = True
    kind: Literal["rl"]
    init_from: str
    prompts: Mapping[str, PositiveFloat]
    ref_policy: str = ""
    curriculum: DrawConfig | None = None
    settings: RlConfig = field(metadata=INLINE)

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
    """How prompts are drawn by the pass rates that the stage ``difficulty`` has measured.

    Prompts with a pass rate from ``low`` to ``high`` are drawn, and no others; nor those that it did not ask.
    ``weight``: ``even``, each as often as another; ``learnable``, in proportion to p(1 - p) of its pass rate p, as far
    as the number of answers tells it.
    """

    difficulty: str
    low: Fraction = 0.0
    high: Fraction = 1.0
    weight: Literal["even", "learnable"] = "even"

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise ConfigError("low must not be above high")


@dataclass(frozen=True, kw_only=True)
class RlStage:
    """Online RL. ``prompts``: data sets of prompts, each with its share: ``{ gsm8k = 0.7, mbpp = 0.3 }``.

    ``reference``: the checkpoint that KL is measured to, a teacher or the champion; left out: ``start``. ``draw``: how
    often each prompt of a data set comes; left out: all equally often.
    """

    makes: ClassVar[Product] = "checkpoint"
    reads: ClassVar[Rows] = "prompts"
    data_key: ClassVar[str] = "prompts"
    is_compared: ClassVar[bool] = True
    kind: Literal["rl"]
    start: str
    prompts: Mapping[str, PositiveFloat]
    reference: str = ""
    draw: DrawConfig | None = None
    settings: RlConfig = field(metadata=INLINE)

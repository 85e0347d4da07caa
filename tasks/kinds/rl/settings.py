"""Preset table of online RL."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from rlcore.config.bounds import Fraction, PositiveFloat
from rlcore.config.rl import RlConfig
from rlcore.errors import ConfigError
from rlcore.strict_config import INLINE
from rlcore.tasks.kinds.facts import Product, Rows


@dataclass(frozen=True, kw_only=True)
class DrawConfig:
    """Selection of prompts by the pass rates that the stage ``pass_rates`` has measured.

    Only prompts with a measured pass rate from ``min_pass_rate`` to ``max_pass_rate`` are drawn. ``weighting``:
    ``even`` draws all equally often; ``learnability`` in proportion to p(1 - p) of the pass rate p, to the resolution
    that the number of answers allows.
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
    """Online RL. ``prompts``: datasets of prompts with mixture weights: ``{ gsm8k = 0.7, mbpp = 0.3 }``.

    ``ref_policy``: the checkpoint that KL is measured to; default: ``init_from``. ``curriculum``: how often each prompt
    of a dataset is drawn; default: equally often.
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

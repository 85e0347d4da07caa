"""The factor that lifts a loss so that its gradient does not vanish in float16 (Micikevicius et al. 2018, section 3.2).

The scale is halved where the gradient overflows, and the same step is done again: no step is lost. It is doubled after
many steps without an overflow. All scales are powers of two, so that dividing by them is exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from rlcore.hardware.precision import compute_dtype

GROWTH_INTERVAL = 200  # steps without an overflow after which a larger scale is tried
LARGEST = 2.0**24
_FIRST = 2.0**15


@dataclass(frozen=True, slots=True)
class LossScale:
    """``value``: what the loss is multiplied by; ``clean_steps``: since it changed. It stays 1 unless it ``adapts``."""

    value: float = 1.0
    clean_steps: int = 0
    adapts: bool = False

    @classmethod
    def of(cls, *models: Any) -> LossScale:
        """The scale that models start with: only products in float16 need one."""
        needed = any(compute_dtype(model) == torch.float16 for model in models)
        return cls(_FIRST, 0, adapts=True) if needed else cls()

    @property
    def can_shrink(self) -> bool:
        """Whether an overflow may be the scale's error."""
        return self.adapts and self.value > 1.0

    def after_overflow(self) -> LossScale:
        """Half the scale."""
        return LossScale(self.value / 2.0, 0, adapts=self.adapts)

    def after_step(self) -> LossScale:
        """The scale of the next step: doubled after ``GROWTH_INTERVAL`` clean ones."""
        if not self.adapts:
            return self
        if self.clean_steps + 1 < GROWTH_INTERVAL:
            return LossScale(self.value, self.clean_steps + 1, adapts=True)
        return LossScale(min(2.0 * self.value, LARGEST), 0, adapts=True)

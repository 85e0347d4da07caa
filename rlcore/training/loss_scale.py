"""Loss scale against gradient underflow in float16 (Micikevicius et al. 2018, section 3.2).

If the gradient overflows, the scale is halved and the step is repeated, so no step is lost. After many steps without
overflow it is doubled. All scales are powers of two, so that dividing by them is exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from rlcore.hardware.precision import compute_dtype

GROWTH_INTERVAL = 200  # steps without overflow before the scale is doubled
LARGEST = 2.0**24
_FIRST = 2.0**15


@dataclass(frozen=True, slots=True)
class LossScale:
    """Factor ``value`` of the loss; ``clean_steps`` since its last change. Constant 1 unless it ``adapts``."""

    value: float = 1.0
    clean_steps: int = 0
    adapts: bool = False

    @classmethod
    def of(cls, *models: Any) -> LossScale:
        """Return the initial scale of models; only products in float16 need one."""
        needed = any(compute_dtype(model) == torch.float16 for model in models)
        return cls(_FIRST, 0, adapts=True) if needed else cls()

    @property
    def can_shrink(self) -> bool:
        """True if an overflow may be caused by the scale."""
        return self.adapts and self.value > 1.0

    def after_overflow(self) -> LossScale:
        """Return half the scale."""
        return LossScale(self.value / 2.0, 0, adapts=self.adapts)

    def after_step(self) -> LossScale:
        """Return the scale of the next step: doubled after ``GROWTH_INTERVAL`` clean steps."""
        if not self.adapts:
            return self
        if self.clean_steps + 1 < GROWTH_INTERVAL:
            return LossScale(self.value, self.clean_steps + 1, adapts=True)
        return LossScale(min(2.0 * self.value, LARGEST), 0, adapts=True)

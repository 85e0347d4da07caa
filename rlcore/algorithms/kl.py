"""KL divergence: estimators, losses with the right gradient, and adaptive coefficients.

With d = policy_logprobs - ref_logprobs on tokens that the policy sampled (Schulman 2020, "Approximating KL
divergence"):

    k1 = d                    unbiased, may be negative; used in the reward
    k2 = d^2 / 2              its gradient is exactly that of the reverse KL
    k3 = exp(-d) + d - 1      unbiased, never negative; used in metrics; its plain gradient is that of the FORWARD KL

As a loss, k1 alone has zero expected gradient, and k3 alone has the wrong gradient. Multiplied by the differentiable
ratio, both are exact. So is k2 times the detached importance weight.

The tokens of KL(old || policy) come from the old policy, so k3 with d = old_logprobs - policy_logprobs is unbiased, and
its plain gradient is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Float

#: (d [N], log_ratio [N]) -> loss [N]; both differentiable, 0 where masked
KlLossFn = Callable[[Tensor, Tensor], Tensor]


def k1(d: Float[Tensor, "tokens"]) -> Float[Tensor, "tokens"]:
    """Return ``d`` [N]."""
    return d


def k2(d: Float[Tensor, "tokens"]) -> Float[Tensor, "tokens"]:
    """Return ``d^2 / 2`` [N]."""
    return 0.5 * d.square()


def k3(d: Float[Tensor, "tokens"]) -> Float[Tensor, "tokens"]:
    """Return ``exp(-d) + d - 1`` [N], never negative."""
    return torch.expm1(-d) + d


KL_LOSSES: Mapping[str, KlLossFn] = {
    "k1_ratio": lambda d, log_ratio: log_ratio.exp() * k1(d),  # gradient of the reverse KL, also off-policy
    "k2": lambda d, log_ratio: log_ratio.detach().exp() * k2(d),  # likewise, with the importance weight detached
    # Likewise, with the low variance of k3. The value is never clamped: a clamp would remove the gradient exactly where
    # the policy has dropped a token.
    "k3_ratio": lambda d, log_ratio: log_ratio.exp() * k3(d),
    "k2_plain": lambda d, _: k2(d),  # gradient of the reverse KL on-policy; biased after the first step of an update
    # As in the GRPO paper (Shao et al. 2024, eq. 4); on-policy its gradient is of the FORWARD KL.
    "k3_plain": lambda d, _: k3(d),
}


@dataclass(frozen=True, kw_only=True)
class KlController:
    """KL coefficient beta, adaptive if ``target`` > 0 (Ziegler et al. 2019, section 2.2).

    ``target`` is in nats per completion, ``horizon`` in completions.
    """

    coefficient: float
    target: float = 0.0
    horizon: int = 10_000

    def updated(self, measured: float, num_samples: int) -> KlController:
        """Return the controller after ``num_samples`` completions of mean KL ``measured``; error clipped to ±0.2."""
        if self.target == 0.0:
            return self
        error = min(max(measured / self.target - 1.0, -0.2), 0.2)
        fraction = min(1.0, num_samples / self.horizon)  # a batch larger than the horizon must not flip the sign
        return replace(self, coefficient=self.coefficient * (1.0 + error * fraction))


@dataclass(frozen=True, kw_only=True)
class PenaltyController:
    """Coefficient beta of the penalty KL(old || policy), for a ``target`` in nats per token (Schulman et al. 2017)."""

    coefficient: float
    target: float

    def updated(self, measured: float) -> PenaltyController:
        """Return the controller after an update of mean KL ``measured``: beta halved below target / 1.5.

        Above 1.5 * target it is doubled (section 4).
        """
        if measured < self.target / 1.5:
            return replace(self, coefficient=self.coefficient / 2.0)
        if measured > self.target * 1.5:
            return replace(self, coefficient=self.coefficient * 2.0)
        return self

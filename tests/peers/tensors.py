"""Padded tensors in the peers' layout, and the same numbers in ours."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rlcore.algorithms.objective import Coefficients, LossInputs
from rlcore.config import RolloutCorrectionConfig

NO_EXTRAS = Coefficients(kl=0.0, kl_estimator="k2", entropy=0.0, mismatch=RolloutCorrectionConfig(mode="off"))


@dataclass(frozen=True, kw_only=True)
class Padded:
    """S completions of up to T tokens, float64 [S, T]. With tool output the mask has holes before the last token."""

    values: torch.Tensor
    mask: torch.Tensor
    policy_logprobs: torch.Tensor
    old_logprobs: torch.Tensor
    ref_logprobs: torch.Tensor
    advantages: torch.Tensor

    def loss_inputs(self, logprobs: torch.Tensor, weights: torch.Tensor) -> LossInputs:
        """All S * T places in a row, padding masked; ``logprobs`` [S, T] may carry a gradient."""
        rows, width = self.mask.shape
        return LossInputs(
            policy_logprobs=logprobs.flatten(),
            entropy=torch.zeros(rows * width, dtype=torch.float64),
            old_logprobs=self.old_logprobs.flatten(),
            sampler_logprobs=self.old_logprobs.flatten(),
            ref_logprobs=self.ref_logprobs.flatten(),
            advantages=self.advantages.flatten(),
            weights=weights.double().flatten(),
            loss_mask=self.mask.flatten(),
            sequence_index=torch.arange(rows).repeat_interleave(width),
        )


def draw(seed: int, *, tool_output: bool = False, drift: float = 0.3) -> Padded:
    """Random rollouts. ``drift``: standard deviation of the log-ratio of new to old policy."""
    generator, count, width = torch.Generator().manual_seed(seed), 12, 9

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64) * scale

    lengths = torch.randint(2, width + 1, (count,), generator=generator)
    mask = torch.arange(width)[None] < lengths[:, None]
    if tool_output:
        holes = torch.rand(count, width, generator=generator) < 0.3
        holes[torch.arange(count), lengths - 1] = False
        mask &= ~holes
    old = normal(count, width, scale=0.5) - 2.0
    return Padded(
        values=normal(count, width, scale=0.5),
        mask=mask,
        policy_logprobs=old + normal(count, width, scale=drift),
        old_logprobs=old,
        ref_logprobs=old + normal(count, width, scale=0.4),
        advantages=normal(count, 1).expand(count, width).clone(),
    )


def assert_equal(ours: torch.Tensor, theirs: torch.Tensor, bound: float) -> None:
    """Equal up to ``bound``, absolute, everywhere; and not because both are zero."""
    assert float(theirs.abs().max()) > 0.0
    difference = float((ours.double() - theirs.double()).abs().max())
    assert difference <= bound, f"{difference:.3g} apart, {bound:.3g} allowed"

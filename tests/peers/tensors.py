"""Padded tensors in the peers' layout, and the same numbers in ours."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from rlcore.algorithms.advantages import AdvantageInputs
from rlcore.algorithms.objective import Coefficients, LossInputs
from rlcore.config import RolloutCorrectionConfig

NO_EXTRAS = Coefficients(kl=0.0, kl_estimator="k2", entropy=0.0, mismatch=RolloutCorrectionConfig(mode="off"))


@dataclass(frozen=True, kw_only=True)
class Padded:
    """S completions of up to T tokens, grouped; float64 [S, T] unless said otherwise.

    ``rewards``: [S]. ``group``: int64 [S]. ``token_rewards`` has the reward on a completion's last token.
    ``mask``: bool; completion i has ``lengths[i]`` tokens, then padding; with tool output there are holes before the
    last token.
    """

    rewards: torch.Tensor
    group: torch.Tensor
    token_rewards: torch.Tensor
    values: torch.Tensor
    mask: torch.Tensor
    policy_logprobs: torch.Tensor
    old_logprobs: torch.Tensor
    ref_logprobs: torch.Tensor
    advantages: torch.Tensor

    @property
    def episodes(self) -> AdvantageInputs:
        """Return the inputs of our advantage functions."""
        return AdvantageInputs(
            rewards=self.rewards,
            group=self.group,
            token_rewards=self.token_rewards,
            values=self.values,
            mask=self.mask,
            next_values=torch.zeros_like(self.values[:, 0]),
        )

    @property
    def index(self) -> np.ndarray:
        """The groups as verl wants them: one hashable name per completion."""
        return np.array([f"prompt-{number}" for number in self.group.tolist()], dtype=object)

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


def draw(
    seed: int,
    *,
    num_groups: int = 3,
    group_size: int = 4,
    width: int = 9,
    tool_output: bool = False,
    lengths: tuple[int, ...] | None = None,
    drift: float = 0.3,
) -> Padded:
    """Random rollouts. ``drift``: standard deviation of the log-ratio of new to old policy."""
    generator = torch.Generator().manual_seed(seed)
    count = num_groups * group_size

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64) * scale

    drawn = torch.randint(2, width + 1, (count,), generator=generator) if lengths is None else torch.tensor(lengths)
    mask = torch.arange(width)[None] < drawn[:, None]
    if tool_output:
        holes = torch.rand(count, width, generator=generator) < 0.3
        holes[torch.arange(count), drawn - 1] = False
        mask &= ~holes
    rewards = normal(count)
    token_rewards = torch.zeros(count, width, dtype=torch.float64)
    token_rewards[torch.arange(count), drawn - 1] = rewards
    old = normal(count, width, scale=0.5) - 2.0
    return Padded(
        rewards=rewards,
        group=torch.arange(num_groups).repeat_interleave(group_size),
        token_rewards=token_rewards,
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

"""Policy losses per token (to be minimised), as pure functions of log-ratio, log-probability and advantage."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch


class Surrogate(NamedTuple):
    """``loss``: float [N]. ``clipped_low``, ``clipped_high``: bool [N], where the bound cut the gradient."""

    loss: torch.Tensor
    clipped_low: torch.Tensor
    clipped_high: torch.Tensor


#: (log_ratio [N], policy_logprobs [N], advantages [N]) -> Surrogate
SurrogateFn = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Surrogate]


def ppo_clip(
    log_ratio: torch.Tensor,
    policy_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> Surrogate:
    """``-min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)`` (PPO, Schulman et al. 2017, eq. 7)."""
    ratio = log_ratio.exp()
    clipped_ratio = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = -torch.minimum(ratio * advantages, clipped_ratio * advantages)
    return Surrogate(
        loss,
        clipped_low=(ratio < 1.0 - clip_low) & (advantages < 0),
        clipped_high=(ratio > 1.0 + clip_high) & (advantages > 0),
    )


def cispo(
    log_ratio: torch.Tensor,
    policy_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> Surrogate:
    """``-clip(ratio).detach() * A * logprob`` (MiniMax-M1 2025, eq. 4): every token keeps a gradient."""
    ratio = log_ratio.detach().exp()
    loss = -ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages * policy_logprobs
    return Surrogate(loss, clipped_low=ratio < 1.0 - clip_low, clipped_high=ratio > 1.0 + clip_high)


def reinforce(log_ratio: torch.Tensor, policy_logprobs: torch.Tensor, advantages: torch.Tensor) -> Surrogate:
    """``-A * logprob`` (Williams 1992; as used by RLOO, Ahmadian et al. 2024)."""
    nowhere = torch.zeros_like(advantages, dtype=torch.bool)
    return Surrogate(-advantages * policy_logprobs, nowhere, nowhere)

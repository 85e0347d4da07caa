"""Training samples with random advantages, ratios, values and reference, so that every term of a loss counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rlcore.checks.audit.reference_impl import AlgorithmSpec
from rlcore.config import RlConfig
from rlcore.seeding import generator
from rlcore.types import TrainingSample


def with_drawn_numbers(
    sample: TrainingSample, own: Sequence[int], logprobs: Tensor, config: RlConfig, row: AlgorithmSpec, *, seed: int
) -> TrainingSample:
    """Return a sample with random numbers for the tokens at ``own``; ``logprobs``: their current log-probabilities."""
    draws, count, positions = generator(seed), len(own), torch.tensor(own)
    known = logprobs.detach().float().cpu()
    clip = config.critic.clip_range or 0.2
    columns = {
        "advantages": torch.randn(count, generator=draws),
        "old_logprobs": _drawn_old(known, row, draws).clamp(max=-1e-4),
        "ref_logprobs": (known + torch.rand(count, generator=draws) - 0.5).clamp(max=-1e-4),
        "values": sample.values[positions] + 3.0 * clip * (torch.rand(count, generator=draws) * 2.0 - 1.0),
        "returns": sample.returns[positions] + torch.randn(count, generator=draws),
    }
    made: dict[str, Any] = {
        name: (known_column := getattr(sample, name)).index_copy(0, positions, new.to(known_column))
        for name, new in columns.items()
    }
    return replace(sample, **made)


def _drawn_old(known: Tensor, row: AlgorithmSpec, draws: torch.Generator) -> Tensor:
    """Return log-probabilities of an old policy, at distances from the policy around the clipping bounds."""
    each, together = (torch.rand(size, generator=draws) * 2.0 - 1.0 for size in (len(known), 1))
    bound = 0.3 if row.surrogate in ("sapo", "unclipped") else min(0.3, max(row.low, row.high))
    if row.surrogate == "dppo_tv":
        return (known.exp() + 3.0 * bound * each).clamp(min=1e-4, max=1.0).log()
    if row.ratio == "token":
        return known - 4.0 * bound * each
    if row.ratio == "sequence":
        return known - 2.0 * bound * together - bound * each
    return known - 3.0 * bound * together / max(1, len(known))

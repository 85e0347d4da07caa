"""Samples of an iteration to minibatches, and the per-token fields of a micro-batch of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rlcore.algorithms.table import Algorithm
from rlcore.packing import PackedBatch
from rlcore.seeding import shuffled
from rlcore.types import TrainingSample


def split_by_prompt(
    samples: Sequence[TrainingSample], count: int, *, seed: int, epoch: int
) -> list[list[TrainingSample]]:
    """Shuffle the groups and deal them into ``count`` minibatches; completions of one prompt stay together."""
    groups: dict[tuple[int, ...], list[TrainingSample]] = {}
    for sample in samples:
        groups.setdefault(sample.prompt_ids, []).append(sample)
    members = list(groups.values())
    order = shuffled(len(members), seed, "minibatches", epoch)
    dealt: list[list[TrainingSample]] = [[] for _ in range(min(count, len(members)))]
    for place, number in enumerate(order):
        dealt[place % len(dealt)] += members[number]
    return dealt


class Columns:
    """Per-token fields of the samples of one micro-batch, flat [N] in the order of ``batch.targets``."""

    def __init__(self, samples: Sequence[TrainingSample], weights: Sequence[torch.Tensor], batch: PackedBatch) -> None:
        self.batch = batch
        self._samples = [samples[number] for number in batch.sequences.tolist()]
        self.weights = torch.cat([weights[number] for number in batch.sequences.tolist()])

    def get(self, name: str) -> torch.Tensor:
        """A field of :class:`TrainingSample` by name, float32 or bool [N]."""
        return torch.cat([getattr(sample, name) for sample in self._samples])


def token_weights(algorithm: Algorithm, samples: Sequence[TrainingSample]) -> list[torch.Tensor]:
    """What each token of an optimizer step counts: float32 [T] per sample."""
    width = max(len(sample.loss_mask) for sample in samples)
    mask = torch.zeros(len(samples), width, dtype=torch.bool)
    for row, sample in enumerate(samples):
        mask[row, : len(sample.loss_mask)] = sample.loss_mask
    weights = algorithm.weighting(mask)
    return [weights[row, : len(sample.loss_mask)] for row, sample in enumerate(samples)]

"""Minibatches of an iteration's samples, and per-token fields of their micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlcore.algorithms.table import Algorithm
from rlcore.errors import NonFiniteError
from rlcore.seeding import shuffled
from rlcore.text.packing import PackedBatch, TokenSequence
from rlcore.types import TrainingSample

if TYPE_CHECKING:
    from jaxtyping import Float, Shaped


def split_by_group(
    samples: Sequence[TrainingSample], count: int, *, seed: int, epoch: int
) -> list[list[TrainingSample]]:
    """Shuffle the groups into ``count`` minibatches; the episodes of a group, with all samples, stay together."""
    groups: dict[int, list[TrainingSample]] = {}
    for sample in samples:
        groups.setdefault(sample.group, []).append(sample)
    members = list(groups.values())
    order = shuffled(len(members), seed, "minibatches", epoch)
    dealt: list[list[TrainingSample]] = [[] for _ in range(min(count, len(members)))]
    for index, number in enumerate(order):
        dealt[index % len(dealt)] += members[number]
    return dealt


def token_sequences(samples: Sequence[TrainingSample]) -> list[TokenSequence]:
    """Return the sequences to pack."""
    return [TokenSequence(prompt_ids=sample.prompt_ids, completion_ids=sample.completion_ids) for sample in samples]


def num_policy_tokens(samples: Sequence[TrainingSample]) -> int:
    """Return the number of tokens that the policy produced."""
    return sum(int(sample.loss_mask.sum()) for sample in samples)


class Columns:
    """Per-token fields of the samples of one micro-batch, flat [N] in the order of ``batch.targets``."""

    def __init__(
        self, samples: Sequence[TrainingSample], weights: Sequence[Float[Tensor, "_time"]], batch: PackedBatch
    ) -> None:
        self.batch = batch
        self._samples = [samples[number] for number in batch.sequences.tolist()]
        self.weights = torch.cat([torch.empty(0), *(weights[number] for number in batch.sequences.tolist())])

    def get(self, name: str) -> Shaped[Tensor, "tokens"]:
        """Return a field of :class:`TrainingSample` by name, float32 or bool [N]."""
        kind = torch.bool if name == "loss_mask" else torch.float32
        return torch.cat([torch.empty(0, dtype=kind), *(getattr(sample, name) for sample in self._samples)])

    @property
    def replicas(self) -> Float[Tensor, "tokens"]:
        """Number of the engine that sampled each token."""
        return torch.cat([torch.empty(0), *(torch.full((len(s.loss_mask),), float(s.replica)) for s in self._samples)])


def token_weights(algorithm: Algorithm, samples: Sequence[TrainingSample]) -> list[Float[Tensor, "_time"]]:
    """Return the loss weight of each token of an optimizer step: float32 [T] per sample."""
    width = max(len(sample.loss_mask) for sample in samples)
    mask = torch.zeros(len(samples), width, dtype=torch.bool)
    for row, sample in enumerate(samples):
        mask[row, : len(sample.loss_mask)] = sample.loss_mask
    weights = algorithm.weighting(mask, torch.tensor([sample.episode for sample in samples]))
    return [weights[row, : len(sample.loss_mask)] for row, sample in enumerate(samples)]


def require_finite(samples: Sequence[TrainingSample]) -> None:
    """Check every number that an update reads.

    Raises:
        NonFiniteError: NaN or infinity on a trained token; names the sample.
    """
    names = ("sampler_logprobs", "old_logprobs", "ref_logprobs", "advantages", "values", "returns")
    for number, sample in enumerate(samples):
        for name in names:
            kept = getattr(sample, name)[sample.loss_mask]
            if not bool(kept.isfinite().all()):
                raise NonFiniteError(
                    f"{name} of a completion contain NaN or infinity; no step was taken",
                    where=f"sample {number} of the iteration, prompt token ids {list(sample.prompt_ids)}",
                    fix="check this completion in the rollout table: its reward, and the engine's log-probabilities",
                )

"""Minibatches of an iteration's samples, per-token fields of their micro-batches, and digests of what is trained."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlcore.algorithms.table import Algorithm
from rlcore.errors import CanaryError, NonFiniteError
from rlcore.hardware.sharded import Ranks
from rlcore.seeding import shuffled
from rlcore.text.packing import PackedBatch, TokenSequence
from rlcore.types import TrainingSample

if TYPE_CHECKING:
    from jaxtyping import Float, Shaped


COLUMNS = ("loss_mask", "sampler_logprobs", "old_logprobs", "ref_logprobs", "advantages", "values", "returns")
"""Fields of a sample with one entry per completion token."""


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
    for number, sample in enumerate(samples):
        for name in COLUMNS[1:]:
            kept = getattr(sample, name)[sample.loss_mask]
            if not bool(kept.isfinite().all()):
                raise NonFiniteError(
                    f"{name} of a completion contain NaN or infinity; no step was taken",
                    where=f"sample {number} of the iteration, prompt token ids {list(sample.prompt_ids)}",
                    fix="check this completion in the rollout table: its reward, and the engine's log-probabilities",
                )


def digest(sample: TrainingSample) -> str:
    """Return the digest of a sample's episode, group, tokens, mask and numbers, bit for bit."""
    found = hashlib.blake2b(digest_size=16)
    for ids in ((sample.episode, sample.group), sample.prompt_ids, sample.completion_ids):
        found.update(array("q", [len(ids), *ids]).tobytes())
    for name in COLUMNS:
        found.update(getattr(sample, name).numpy().tobytes())
    return found.hexdigest()


def digest_of_digests(digests: Iterable[str]) -> str:
    """Return one digest of many, in any order."""
    return hashlib.blake2b("".join(sorted(digests)).encode(), digest_size=16).hexdigest()


def require_same(samples: Iterable[TrainingSample], ranks: Ranks) -> None:
    """Check that all ranks have the same samples.

    Raises:
        CanaryError: A rank has other samples than the first one.
    """
    if ranks.size == 1:
        return
    first, *others = ranks.gather(digest_of(samples))
    for number, other in enumerate(others, start=1):
        if other != first:
            raise CanaryError(
                f"rank {number} received other samples than rank 0",
                fix="they were changed in transfer; no step was taken",
            )


def digest_of(samples: Iterable[TrainingSample]) -> str:
    """Return the digest that an epoch over ``samples`` must report."""
    return digest_of_digests(map(digest, samples))

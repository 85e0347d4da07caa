"""Digests of training samples, to verify that every rank trains on the audited samples."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable

from rlcore.errors import CanaryError
from rlcore.hardware.ranks import Ranks
from rlcore.types import TrainingSample

_FIELDS = ("loss_mask", "sampler_logprobs", "old_logprobs", "ref_logprobs", "advantages", "values", "returns")


def digest(sample: TrainingSample) -> str:
    """Return the digest of a sample's episode, group, tokens, mask and numbers, bit for bit."""
    found = hashlib.blake2b(digest_size=16)
    for ids in ((sample.episode, sample.group), sample.prompt_ids, sample.completion_ids):
        found.update(array("q", [len(ids), *ids]).tobytes())
    for name in _FIELDS:
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

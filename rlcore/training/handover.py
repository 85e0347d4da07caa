"""Digests of samples: what the audit has looked at is what a gradient is made of, on every rank."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable

from rlcore.distributed.ranks import Ranks
from rlcore.errors import CanaryError
from rlcore.types import TrainingSample

_FIELDS = ("loss_mask", "sampler_logprobs", "old_logprobs", "ref_logprobs", "advantages", "values", "returns")


def digest(sample: TrainingSample) -> str:
    """A digest of a sample's tokens, mask and numbers, last bits included."""
    found = hashlib.blake2b(digest_size=16)
    for ids in (sample.prompt_ids, sample.completion_ids):
        found.update(array("q", [len(ids), *ids]).tobytes())
    for name in _FIELDS:
        found.update(getattr(sample, name).numpy().tobytes())
    return found.hexdigest()


def digest_of_digests(digests: Iterable[str]) -> str:
    """One digest of many, in whatever order they come."""
    return hashlib.blake2b("".join(sorted(digests)).encode(), digest_size=16).hexdigest()


def require_same(samples: Iterable[TrainingSample], ranks: Ranks) -> None:
    """Every rank has been given the same samples: of others the gradient of none would be the sum.

    Raises:
        CanaryError: names a rank with others than the first one's.
    """
    if ranks.size == 1:
        return
    first, *others = ranks.gather(digest_of(samples))
    for number, other in enumerate(others, start=1):
        if other != first:
            raise CanaryError(
                f"rank {number} was given other samples than rank 0",
                fix="they were changed on their way to the ranks; no step was taken",
            )


def digest_of(samples: Iterable[TrainingSample]) -> str:
    """What an epoch over ``samples`` has to have learned from."""
    return digest_of_digests(map(digest, samples))

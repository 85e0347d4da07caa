"""Random draws as functions of (seed, purpose): a resumed run draws the same numbers without stored generators."""

from __future__ import annotations

import hashlib

import torch


def derive_seed(seed: int, *purpose: str | int) -> int:
    """Return a 63-bit seed for one purpose, independent of all other purposes: ``derive_seed(0, "rollout", 7)``."""
    text = "/".join(map(str, (seed, *purpose)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def generator(seed: int, *purpose: str | int) -> torch.Generator:
    """Return a CPU generator seeded for one purpose."""
    return torch.Generator().manual_seed(derive_seed(seed, *purpose))


def shuffled(count: int, seed: int, *purpose: str | int) -> list[int]:
    """Return a permutation of ``range(count)``."""
    order: list[int] = torch.randperm(count, generator=generator(seed, *purpose)).tolist()
    return order

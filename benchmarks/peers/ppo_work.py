"""The PPO work, the same for every arm: one iteration of 64 completions of forced lengths, and one epoch on them.

Sampling, log-probabilities of policy and reference, values, scores of a reward model, KL 0.05 (k1) in the reward, GAE
(1, 0.95), whitened advantages, both losses clipped at 0.2, one step an epoch, AdamW, float32. Of two sizes: ``tiny``,
the model and the lengths of :mod:`benchmarks.peers.work`, for time; ``smollm2``, its shape with 8 short
completions, whose weights weigh more than its activations, for memory in multiples of the model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.peers import work

NUM_EPOCHS, KL, RANK, LEARNING_RATE = 1, 0.05, 8, 1e-6


@dataclass(frozen=True, kw_only=True)
class Work:
    """Prompts as token ids, ``group_size`` completions of each, and their lengths, int64 [prompts * group_size]."""

    prompts: tuple[tuple[int, ...], ...]
    group_size: int
    lengths: torch.Tensor
    tokens_per_microbatch: int
    rows_per_microbatch: int

    @property
    def repeated(self) -> list[tuple[int, ...]]:
        """The prompt of each completion."""
        return [prompt for prompt in self.prompts for _ in range(self.group_size)]


def make_work(size: str) -> Work:
    """The completions of one of the two sizes."""
    if size == "tiny":
        lengths = work.completion_lengths()
        prompts = tuple(work.prompts())
        return Work(prompts=prompts, group_size=8, lengths=lengths, tokens_per_microbatch=2048, rows_per_microbatch=16)
    return Work(
        prompts=tuple(prompt[:32] for prompt in work.prompts()[:2]),
        group_size=4,
        lengths=torch.tensor([4, 8, 12, 16, 16, 12, 8, 4]),
        tokens_per_microbatch=512,
        rows_per_microbatch=8,
    )

"""PPO and GRPO losses as plain loops over sequences and tokens, straight from the papers' formulas.

A sequence is a list of tokens; a token is a tuple of Python floats, or of float64 scalars where a gradient is wanted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from rlcore.text.packing import TokenSequence


class Token(NamedTuple):
    """One token that the policy produced. Log-probabilities are float64 scalars."""

    logprob: torch.Tensor
    old_logprob: torch.Tensor
    ref_logprob: torch.Tensor
    advantage: float


def clipped_objective(token: Token, low: float, high: float) -> torch.Tensor:
    """``min(ratio A, clip(ratio) A)``, to be maximised (Schulman et al. 2017, eq. 7)."""
    ratio = torch.exp(token.logprob - token.old_logprob)
    clipped = ratio if low <= ratio <= high else torch.tensor(low if ratio < low else high, dtype=torch.float64)
    first, second = ratio * token.advantage, clipped * token.advantage
    return first if first <= second else second


def ppo_loss(sequences: Sequence[Sequence[Token]], *, clip: float) -> torch.Tensor:
    """Minus the mean over all tokens of the batch."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for sequence in sequences:
        for token in sequence:
            total = total - clipped_objective(token, 1.0 - clip, 1.0 + clip)
            count += 1
    return total / count


def grpo_loss(sequences: Sequence[Sequence[Token]], *, clip: float, beta: float) -> torch.Tensor:
    """Minus the mean over sequences of the mean over tokens (Shao et al. 2024, eq. 3), k3 weighted by the ratio."""
    total = torch.zeros((), dtype=torch.float64)
    for sequence in sequences:
        of_sequence = torch.zeros((), dtype=torch.float64)
        for token in sequence:
            gap = token.ref_logprob - token.logprob
            kl = torch.exp(token.logprob - token.old_logprob) * (torch.exp(gap) - gap - 1.0)
            of_sequence = of_sequence + clipped_objective(token, 1.0 - clip, 1.0 + clip) - beta * kl
        total = total - of_sequence / len(sequence)
    return total / len(sequences)


def one_at_a_time(model: PreTrainedModel, sequence: TokenSequence, *, temperature: float = 1.0) -> torch.Tensor:
    """Log-probabilities [T] of one completion from an unpacked, unpadded forward pass with the model's own logits."""
    ids = torch.tensor([sequence.prompt_ids + sequence.completion_ids])
    logits = model(ids).logits[0] / temperature
    first = len(sequence.prompt_ids) - 1
    return torch.stack([logits[first + t].log_softmax(-1)[token] for t, token in enumerate(sequence.completion_ids)])

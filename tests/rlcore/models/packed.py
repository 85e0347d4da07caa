"""A model on packed batches beside the same model on one sequence at a time."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from rlcore.models.policy import completion_logprobs
from rlcore.text.packing import TokenSequence, pack
from tests import strategies
from tests.reference.losses import one_at_a_time

BOUNDS = {torch.float32: 1e-5, torch.float64: 1e-9}
PRECISIONS = pytest.mark.parametrize("dtype", BOUNDS, ids=str)
# one sequence a batch, split trees (a family of 5 + 3 * 7 does not fit), several rows with padding, all in one batch
BUDGETS = pytest.mark.parametrize("budget", [1, 20, 70, 1000])


def gradients(loss: torch.Tensor, model: PreTrainedModel) -> torch.Tensor:
    """The gradient with respect to all parameters, flat."""
    parts = torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad])
    return torch.cat([part.flatten() for part in parts])


def weight(place: int) -> float:
    """Some weight of a token, different for each of its places."""
    return 0.3 + 0.1 * place


def packed_loss(model: PreTrainedModel, sequences: list[TokenSequence], budget: int) -> torch.Tensor:
    """A weighted sum of all log-probabilities from packed micro-batches."""
    total = torch.zeros((), dtype=model.dtype)
    for batch in pack(sequences, tokens_per_microbatch=budget):
        logprobs, _ = completion_logprobs(model, batch, temperature=0.8)
        places = (batch.sequence_index + batch.token_index).tolist()
        total = total + (torch.tensor([weight(place) for place in places], dtype=model.dtype) * logprobs).sum()
    return total


def plain_loss(model: PreTrainedModel, sequences: list[TokenSequence]) -> torch.Tensor:
    """The same sum from one sequence at a time."""
    total = torch.zeros((), dtype=model.dtype)
    for number, sequence in enumerate(sequences):
        for place, logprob in enumerate(one_at_a_time(model, sequence, temperature=0.8)):
            total = total + weight(number + place) * logprob
    return total


def gradient_error(model: PreTrainedModel, budget: int) -> float:
    """Return the relative difference of the packed loss's gradient from the plain one."""
    sequences = strategies.random_sequences(1, max_tokens=9)
    expected = gradients(plain_loss(model, sequences), model)
    return float((gradients(packed_loss(model, sequences, budget), model) - expected).norm() / expected.norm())

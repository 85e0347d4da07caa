"""The loss with its gradient in three products: equal to autograd through the full softmax."""

from __future__ import annotations

import pytest
import torch

from rlcore.models import head_loss
from rlcore.models.head_loss import fits, fused_loss
from tests.largest_tensor import LargestTensor
from tests.rlcore.models.test_logprobs import HIDDEN, NUM_TOKENS, VOCABULARY, full, problem

LENGTHS = (4, 1, 5, 3)  # their sum is NUM_TOKENS
WEIGHTS = torch.linspace(-1, 1, NUM_TOKENS, dtype=torch.float64)


def weighted(places: slice, logprobs: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
    """Not linear in the log-probabilities, and of the entropy as well, which carries no gradient."""
    weights = WEIGHTS[places].to(logprobs.dtype)
    return (weights * (logprobs - 0.1 * logprobs.square()) + 0.3 * weights * entropy).sum()


def both(temperature: float, dtype: torch.dtype) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """Loss and gradients, fused and through the full table."""
    hidden, head, targets = problem(dtype)
    ours = fused_loss(hidden, head, targets, weighted, lengths=LENGTHS, temperature=temperature)
    logprobs, entropy = full(hidden, head, targets, temperature)
    theirs = weighted(slice(None), logprobs, entropy.detach())
    return tuple((loss.detach(), *torch.autograd.grad(2.0 * loss, (hidden, head))) for loss in (ours, theirs))  # type: ignore[return-value]


@pytest.mark.parametrize("chunk_size", [1, 6, 13, 1024])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_loss_and_gradients_equal_those_of_the_full_softmax(
    chunk_size: int, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_loss, "_ROWS", chunk_size)
    ours, theirs = both(temperature, torch.float64)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_in_float32_the_gradients_differ_by_rounding_alone() -> None:
    for ours, theirs in zip(*both(0.8, torch.float32), strict=True):
        assert float((ours - theirs).norm() / theirs.norm()) < 1e-5


def test_chunks_hold_whole_sequences() -> None:
    seen = []

    def note(places: slice, logprobs: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
        seen.append((places.start, places.stop))
        return logprobs.sum()

    hidden, head, targets = problem()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head_loss, "_ROWS", 6)
        patch.setattr(head_loss, "CHUNK_SIZE", 6)
        fused_loss(hidden, head, targets, note, lengths=LENGTHS)
        assert fits(LENGTHS)
        assert not fits((7,))
    assert seen == [(0, 5), (5, 10), (10, 13)]  # 4 + 1, then 5 (with 3 it were 8), then 3


def test_a_frozen_head_gets_no_gradient_and_the_states_the_same_one() -> None:
    hidden, head, targets = problem()
    (expected,) = torch.autograd.grad(fused_loss(hidden, head, targets, weighted, lengths=LENGTHS), hidden)
    frozen = head.detach()
    (ours,) = torch.autograd.grad(fused_loss(hidden, frozen, targets, weighted, lengths=LENGTHS), hidden)
    assert torch.equal(ours, expected)


def test_one_buffer_of_a_chunk_times_the_vocabulary_is_all_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_loss, "_ROWS", 16)
    hidden = torch.randn(512, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    head = torch.randn(1000, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
    with LargestTensor() as largest:
        fused_loss(
            hidden, head, torch.zeros(512, dtype=torch.int64), lambda _, p, __: p.sum(), lengths=(8,) * 64
        ).backward()
    assert largest.num_elements == 16 * 1000  # and not 512 * 1000


def test_extreme_logits_stay_finite() -> None:
    hidden = torch.tensor([[1e4], [-1e4]], requires_grad=True)
    head = torch.tensor([[1.0], [0.0], [-1.0]], requires_grad=True)
    seen = []

    def note(_: slice, logprobs: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
        seen.append((logprobs.tolist(), entropy.tolist()))
        return logprobs.sum()

    loss = fused_loss(hidden, head, torch.tensor([0, 0]), note, lengths=(1, 1))
    loss.backward()
    # Second row: ln p = -20000, and d ln p / dh = 1 - (-1) = 2.
    assert seen[0][0] == [0.0, -20000.0]
    assert seen[0][1] == pytest.approx([0.0, 0.0], abs=1e-2)
    assert hidden.grad is not None
    assert hidden.grad.tolist() == [[0.0], [2.0]]


def test_shapes_of_the_problem_are_those_that_the_lengths_say() -> None:
    assert (sum(LENGTHS), HIDDEN, VOCABULARY) == (NUM_TOKENS, 6, 17)

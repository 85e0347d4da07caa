"""Chunked log-probabilities: equal to the full softmax in value and gradient, and never the whole of it in memory."""

from __future__ import annotations

import pytest
import torch

from rlcore.hardware.precision import at_least_float32
from rlcore.models.logprobs import chunked_logprobs, target_logprobs
from tests.largest_tensor import LargestTensor

NUM_TOKENS, HIDDEN, VOCABULARY = 13, 6, 17


def problem(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states and head (both with gradient), and targets."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(NUM_TOKENS, HIDDEN, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    head = torch.randn(VOCABULARY, HIDDEN, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    return hidden, head, torch.randint(0, VOCABULARY, (NUM_TOKENS,), generator=generator)


def full(
    hidden: torch.Tensor, head: torch.Tensor, targets: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same by the whole table of log-probabilities."""
    table = (hidden @ head.T / temperature).log_softmax(-1)
    return table[torch.arange(NUM_TOKENS), targets], -(table.exp() * table).sum(-1)


@pytest.mark.parametrize("chunk_size", [1, 4, 13, 1024])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_chunks_equal_the_full_softmax_in_value_and_gradient(chunk_size: int, temperature: float) -> None:
    hidden, head, targets = problem()
    ours = chunked_logprobs(
        hidden, head, targets, temperature=temperature, chunk_size=chunk_size, entropy_gradient=True
    )
    theirs = full(hidden, head, targets, temperature)
    weights = torch.linspace(-1, 1, NUM_TOKENS, dtype=torch.float64)
    gradients = [
        torch.autograd.grad((weights * (logprobs + 0.3 * entropy)).sum(), (hidden, head))
        for logprobs, entropy in (ours, theirs)
    ]
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-12)


def test_the_entropy_carries_no_gradient_unless_asked_for() -> None:
    hidden, head, targets = problem()
    logprobs, entropy = chunked_logprobs(hidden, head, targets, chunk_size=5)
    assert logprobs.requires_grad
    assert not entropy.requires_grad
    torch.testing.assert_close(entropy, full(hidden, head, targets, 1.0)[1].detach())


def test_the_entropy_of_a_uniform_distribution_is_the_logarithm_of_the_vocabulary() -> None:
    _, entropy = chunked_logprobs(torch.zeros(2, HIDDEN), torch.ones(VOCABULARY, HIDDEN), torch.tensor([0, 1]))
    assert entropy.tolist() == pytest.approx([torch.tensor(float(VOCABULARY)).log().item()] * 2)


def test_half_precision_states_give_float32_log_probabilities() -> None:
    hidden, head, targets = problem(torch.bfloat16)
    logprobs, entropy = chunked_logprobs(hidden, head, targets)
    assert (logprobs.dtype, entropy.dtype) == (torch.float32, torch.float32)
    assert at_least_float32(torch.zeros(1, dtype=torch.float64)).dtype == torch.float64


def test_extreme_logits_stay_finite() -> None:
    hidden = torch.tensor([[1e4], [-1e4]])
    logprobs, entropy = chunked_logprobs(hidden, torch.tensor([[1.0], [0.0], [-1.0]]), torch.tensor([0, 0]))
    assert logprobs.tolist() == [0.0, -20000.0]
    assert entropy.tolist() == pytest.approx([0.0, 0.0], abs=1e-2)


def test_no_tensor_of_all_tokens_times_the_vocabulary_is_ever_made() -> None:
    num_tokens, chunk_size, vocabulary = 512, 16, 1000
    hidden = torch.randn(num_tokens, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    head = torch.randn(vocabulary, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
    with LargestTensor() as largest:
        logprobs, entropy = chunked_logprobs(
            hidden, head, torch.zeros(num_tokens, dtype=torch.int64), chunk_size=chunk_size, entropy_gradient=True
        )
        (logprobs + entropy).sum().backward()
    assert hidden.grad is not None
    assert largest.num_elements == chunk_size * vocabulary  # 16,000 and not 512,000


def test_the_watch_sees_the_full_table_where_there_is_one() -> None:
    hidden, head, targets = problem()
    with LargestTensor() as largest:
        full(hidden, head, targets, 1.0)
    assert largest.num_elements == NUM_TOKENS * VOCABULARY


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probabilities_alone_are_the_same_bit_for_bit(dtype: torch.dtype, temperature: float) -> None:
    hidden, head, targets = problem(dtype)
    for chunk_size in (4, 1024):
        options = {"temperature": temperature, "chunk_size": chunk_size}
        alone = target_logprobs(hidden, head, targets, **options)
        assert not alone.requires_grad
        assert torch.equal(alone, chunked_logprobs(hidden, head, targets, **options)[0].detach())


def test_no_targets_have_no_log_probabilities() -> None:
    assert target_logprobs(torch.zeros(0, 3), torch.zeros(5, 3), torch.zeros(0, dtype=torch.int64)).shape == (0,)

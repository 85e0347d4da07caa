"""Hand-written kernels in half precision: no worse than autograd under autocast of the same precision, token by token.

The truth is float64 on the very numbers that half precision can hold: what is measured is the kernel's own rounding.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from rlcore.models.head_loss import fused_loss
from rlcore.models.logprobs import chunked_logprobs, target_logprobs

NUM_TOKENS, HIDDEN, VOCABULARY = 96, 64, 300
LENGTHS = (40, 1, 30, 25)
HALVES = [torch.bfloat16, torch.float16]


@dataclass(frozen=True, kw_only=True)
class Problem:
    """States [N, H] and a head [V, H] that half precision holds; ``targets`` [N], mostly the likeliest tokens."""

    hidden: torch.Tensor
    head: torch.Tensor
    targets: torch.Tensor


def peaked(dtype: torch.dtype, sharpness: float) -> Problem:
    """A policy that is sure of most tokens: logits of a standard deviation of ``sharpness``."""
    draws = torch.Generator().manual_seed(0)
    hidden = torch.randn(NUM_TOKENS, HIDDEN, generator=draws).to(dtype).double()
    head = (sharpness / HIDDEN**0.5 * torch.randn(VOCABULARY, HIDDEN, generator=draws)).to(dtype).double()
    targets = (hidden @ head.T).argmax(-1)
    targets[::8] = torch.randint(VOCABULARY, (len(targets[::8]),), generator=draws)
    return Problem(hidden=hidden, head=head, targets=targets)


@dataclass(frozen=True, kw_only=True)
class Result:
    """Log-probability and entropy [N] of each token, gradient by the states [N, H] and by the head [V, H]."""

    logprobs: torch.Tensor
    entropy: torch.Tensor
    of_hidden: torch.Tensor
    of_head: torch.Tensor


def truth(problem: Problem, temperature: float) -> Result:
    hidden, head = (each.clone().requires_grad_() for each in (problem.hidden, problem.head))
    logprobs = (hidden @ head.T / temperature).log_softmax(-1)
    return result(logprobs, problem.targets, hidden, head)


def result(logprobs: torch.Tensor, targets: torch.Tensor, hidden: torch.Tensor, head: torch.Tensor) -> Result:
    chosen = logprobs.gather(-1, targets[:, None])[:, 0]
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    of_hidden, of_head = torch.autograd.grad(chosen.sum() / NUM_TOKENS, (hidden, head))
    return Result(logprobs=chosen.detach(), entropy=entropy.detach(), of_hidden=of_hidden, of_head=of_head)


def plain(problem: Problem, temperature: float, dtype: torch.dtype) -> Result:
    """Compute the obvious version: the product under autocast, the softmax in float32."""
    hidden, head = (each.float().requires_grad_() for each in (problem.hidden, problem.head))
    with torch.autocast("cpu", dtype=dtype):
        logits = hidden @ head.T
    return result((logits.float() / temperature).log_softmax(-1), problem.targets, hidden, head)


def fused(problem: Problem, temperature: float, dtype: torch.dtype) -> Result:
    hidden, head = (each.float().requires_grad_() for each in (problem.hidden, problem.head))
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def note(places: slice, logprobs: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
        seen.append((logprobs.detach(), entropy))
        return logprobs.sum() / NUM_TOKENS

    loss = fused_loss(hidden, head, problem.targets, note, lengths=LENGTHS, temperature=temperature, dtype=dtype)
    of_hidden, of_head = torch.autograd.grad(loss, (hidden, head))
    logprobs, entropy = (torch.cat(parts) for parts in zip(*seen, strict=True))
    return Result(logprobs=logprobs, entropy=entropy, of_hidden=of_hidden, of_head=of_head)


def chunked(problem: Problem, temperature: float, dtype: torch.dtype) -> Result:
    hidden, head = (each.float().requires_grad_() for each in (problem.hidden, problem.head))
    logprobs, entropy = chunked_logprobs(
        hidden, head, problem.targets, temperature=temperature, chunk_size=33, dtype=dtype
    )
    of_hidden, of_head = torch.autograd.grad(logprobs.sum() / NUM_TOKENS, (hidden, head))
    return Result(logprobs=logprobs.detach(), entropy=entropy.detach(), of_hidden=of_hidden, of_head=of_head)


def row_errors(ours: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """The relative error of each row [N]. A token that float32 cannot tell from certain has none: 1e-5 of others."""
    return (ours.double() - exact).norm(dim=-1) / exact.norm(dim=-1).clamp(min=1e-5 * float(exact.norm(dim=-1).max()))


@pytest.mark.parametrize("kernel", [fused, chunked])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
@pytest.mark.parametrize("sharpness", [1.0, 4.0, 12.0])
def test_no_token_is_further_from_the_truth_than_under_plain_autocast(
    kernel: object, dtype: torch.dtype, temperature: float, sharpness: float
) -> None:
    problem = peaked(dtype, sharpness)
    exact, theirs = truth(problem, temperature), plain(problem, temperature, dtype)
    ours = kernel(problem, temperature, dtype)  # type: ignore[operator]
    unit = torch.finfo(dtype).eps
    # From the same rounded logits log-probabilities and entropies are those of a float32 softmax.
    assert float((ours.logprobs - theirs.logprobs).abs().max()) < 1e-5
    assert float((ours.entropy - theirs.entropy).abs().max()) < 1e-5
    # Per token: within four units of rounding of the gradient beside autograd's own error.
    slack = 4 * unit + 2 * row_errors(theirs.of_hidden, exact.of_hidden)
    assert bool((row_errors(ours.of_hidden, exact.of_hidden) <= slack).all())
    whole = float((ours.of_head.double() - exact.of_head).norm() / exact.of_head.norm())
    assert whole <= 4 * unit + 2 * float((theirs.of_head.double() - exact.of_head).norm() / exact.of_head.norm())


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_the_entropy_of_a_confident_policy_is_right_to_a_tenth(dtype: torch.dtype) -> None:
    # Two likely tokens and many that share a thousandth, logits that half precision holds: H = 0.0016 and the like.
    gaps = torch.tensor([6.0, 7.0, 8.0, 10.0, 14.0])
    head = torch.zeros(3, 5)
    head[0] = gaps
    exact = torch.stack([torch.distributions.Categorical(logits=row.double()).entropy() for row in (head.T)])
    entropies: list[torch.Tensor] = []

    def note(places: slice, logprobs: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
        entropies.append(entropy)
        return logprobs.sum()

    fused_loss(torch.eye(5).requires_grad_(), head, torch.zeros(5, dtype=torch.int64), note, lengths=(5,), dtype=dtype)
    assert float(exact.min()) < 5e-5
    torch.testing.assert_close(entropies[0].double(), exact, rtol=0.1, atol=0.0)


@pytest.mark.parametrize("dtype", HALVES)
def test_scores_are_those_of_training_bit_for_bit_at_any_temperature(dtype: torch.dtype) -> None:
    problem = peaked(dtype, 4.0)
    hidden, head = problem.hidden.float(), problem.head.float()
    for temperature in (0.6, 1.0, 1.7):
        scores = target_logprobs(hidden, head, problem.targets, temperature=temperature, dtype=dtype)
        assert torch.equal(scores, chunked(problem, temperature, dtype).logprobs)
        torch.testing.assert_close(scores, fused(problem, temperature, dtype).logprobs, rtol=0.0, atol=2e-6)


@pytest.mark.parametrize("dtype", HALVES)
def test_the_gradient_of_sure_tokens_is_no_rounding_error(dtype: torch.dtype) -> None:
    problem = peaked(dtype, 12.0)
    exact, ours = truth(problem, 1.0), fused(problem, 1.0, dtype)
    sure = (exact.logprobs > -1e-3) & (exact.logprobs < -1e-7)
    assert int(sure.sum()) >= 5
    # Rounded logits move a small probability by their own error: half a step of bfloat16 at logits of 40 is 0.125.
    bound = 0.3 if dtype == torch.bfloat16 else 0.05
    assert float(row_errors(ours.of_hidden, exact.of_hidden)[sure].max()) < bound

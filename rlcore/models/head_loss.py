"""A loss of log-probabilities together with its gradient, chunk by chunk: three products of the head and not four.

With e = exp(h W' - max) in the one buffer [chunk, V] there is, Z = sum(e), and g = dloss/dlogprob of each token:

    logprob = h·W[target] - max - ln Z             1st product:  h W'
    dloss/dh = g (W[target] - e W / Z)             2nd product:  e W, which gives the entropy too, by h·(e W) / Z
    dloss/dW = sum of g h at W[target] - e' (g h / Z)     3rd product

g has to be known while e stands, so the loss is a sum over chunks of whole sequences. The plain path, which computes e
a second time in its backward pass, is :func:`rlcore.models.logprobs.chunked_logprobs`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from rlcore.models.logprobs import CHUNK_SIZE, at_least_float32

LossOfChunk = Callable[[slice, torch.Tensor, torch.Tensor], torch.Tensor]


def fused_loss(
    hidden: torch.Tensor,
    head_weight: torch.Tensor,
    targets: torch.Tensor,
    loss_of: LossOfChunk,
    *,
    lengths: Sequence[int],
    temperature: float = 1.0,
) -> torch.Tensor:
    """The sum of ``loss_of`` over chunks of whole sequences; the gradient is computed on the way.

    Args:
        hidden: [N, H], the states that predict the targets.
        head_weight: [V, H].
        targets: int64 [N].
        loss_of: (places in N, log-probabilities [n] that carry the gradient, entropies [n] that carry none) -> scalar.
            Called once a chunk. Both are float32 (float64 for a float64 model), in nats.
        lengths: tokens of each sequence, in the order of the targets; their sum is N.
        temperature: of the distribution that was sampled from.
    """
    arguments = (hidden, head_weight, targets, loss_of, tuple(lengths), temperature)
    loss: torch.Tensor = _FusedLoss.apply(*arguments)  # type: ignore[no-untyped-call]
    return loss


def fits(lengths: Sequence[int]) -> bool:
    """Whether every sequence is short enough to stand in a chunk as a whole."""
    return max(lengths, default=0) <= CHUNK_SIZE


class _FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        head_weight: torch.Tensor,
        targets: torch.Tensor,
        loss_of: LossOfChunk,
        lengths: tuple[int, ...],
        temperature: float,
    ) -> torch.Tensor:
        loss = at_least_float32(hidden.new_zeros(()))
        hidden_gradient = torch.empty_like(hidden)
        weight_gradient = torch.zeros_like(head_weight) if ctx.needs_input_grad[1] else None
        for chunk in _chunks(lengths):
            scaled = hidden[chunk] / temperature
            powers = at_least_float32(scaled @ head_weight.T)
            peak = powers.amax(-1, keepdim=True)
            logprobs = powers.gather(-1, targets[chunk, None])
            total = powers.sub_(peak).exp_().sum(-1, keepdim=True)
            log_total = peak + total.log()
            expected = (powers.to(head_weight.dtype) @ head_weight) / total  # of the head's rows: [n, H]
            entropy = log_total - (expected * scaled).sum(-1, keepdim=True)
            part, slope = _differentiate(loss_of, chunk, (logprobs - log_total)[:, 0], entropy[:, 0])
            loss += part
            hidden_gradient[chunk] = (head_weight[targets[chunk]] - expected) * (slope / temperature)
            if weight_gradient is not None:
                pulls = (scaled * slope).to(head_weight.dtype)
                weight_gradient.addmm_(powers.to(head_weight.dtype).T, (pulls / total).to(head_weight.dtype), alpha=-1)
                weight_gradient.index_add_(0, targets[chunk], pulls)
            del powers
        ctx.save_for_backward(hidden_gradient, weight_gradient)
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        of_hidden, of_weight = ctx.saved_tensors
        (factor,) = gradients
        scaled_weight = None if of_weight is None else of_weight.mul_(factor)
        return of_hidden * factor, scaled_weight, None, None, None, None


@torch.enable_grad()
def _differentiate(
    loss_of: LossOfChunk, chunk: slice, logprobs: torch.Tensor, entropy: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of a chunk, and its derivative with respect to each log-probability, [n, 1]."""
    leaf = logprobs.detach().requires_grad_()
    loss = loss_of(chunk, leaf, entropy.detach())
    (slope,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), slope[:, None]


def _chunks(lengths: Sequence[int]) -> Iterator[slice]:
    """Neighbouring sequences in lots of at most ``CHUNK_SIZE`` tokens; a longer one is a chunk of its own."""
    start = end = 0
    for length in lengths:
        if end > start and end + length - start > CHUNK_SIZE:
            yield slice(start, end)
            start = end
        end += length
    if end > start:
        yield slice(start, end)

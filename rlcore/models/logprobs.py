"""Log-probabilities and entropy from hidden states, in chunks, so that the [N, V] logits are never all in memory.

:func:`fused_loss` computes loss and gradient in one pass per chunk, with three products of the head instead of four.
With x = h W' / T - max, e = exp(x) in a single buffer [chunk, V], Z = sum(e), and g = dloss/dlogprob:

    logprob = x[target] - ln Z                          1st product:  h W'
    entropy = ln Z - sum(e x) / Z
    dloss/dh = -g / (Z T) d W,  d = e - Z at target     2nd product:  d W
    dloss/dW = -sum of d' (g / (Z T) h)                 3rd product:  d' h

Half precision needs this order: dividing the states by the temperature would round again, and neither the entropy of a
confident policy nor its gradient may be a difference of two large numbers. g must be known while e is in memory, so the
loss is a sum over chunks of whole sequences. :func:`chunked_logprobs` recomputes e in its backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rlcore.hardware.memory import CHUNK_SIZE
from rlcore.hardware.precision import at_least_float32, no_autocast, wide_product

if TYPE_CHECKING:
    from jaxtyping import Float, Int

_ROWS = 512  # rows of logits at once: half a chunk of the plain path takes as long, and half the memory
_BLOCK = 64  # rows of a chunk that are copied while they are exponentiated
_TOKENS = 8192  # tokens of the vocabulary whose part of the head's gradient is computed, and copied, at once
LossOfChunk = Callable[[slice, Tensor, Tensor], Tensor]


def chunked_logprobs(
    hidden: Float[Tensor, "tokens hidden"],
    head_weight: Float[Tensor, "vocab hidden"],
    targets: Int[Tensor, "tokens"],
    *,
    temperature: float = 1.0,
    chunk_size: int = CHUNK_SIZE,
    entropy_gradient: bool = False,
    dtype: torch.dtype | None = None,
) -> tuple[Float[Tensor, "tokens"], Float[Tensor, "tokens"]]:
    """Return log-probability of each target and entropy of each ``softmax(hidden @ head_weight.T / temperature)``.

    Both are float32 [N], in nats (float64 for a float64 model).

    Args:
        hidden: [N, H], states that predict the int64 ``targets`` [N].
        chunk_size: Rows whose [chunk, V] logits are in memory together.
        entropy_gradient: Differentiate the entropy, which costs a second softmax backward.
        dtype: dtype of the products with the head; by default that of ``head_weight``.
    """
    cast = head_weight.detach().to(dtype or head_weight.dtype)
    results = [
        checkpoint(
            _logprobs_of_chunk,
            hidden[start : start + chunk_size],
            head_weight,
            cast,
            targets[start : start + chunk_size],
            temperature,
            entropy_gradient,
            use_reentrant=False,
            preserve_rng_state=False,
        )
        for start in range(0, len(targets) or 1, chunk_size)
    ]
    logprobs, entropy = zip(*results, strict=True)
    return torch.cat(logprobs), torch.cat(entropy)


@torch.no_grad()
def target_logprobs(
    hidden: Float[Tensor, "tokens hidden"],
    head_weight: Float[Tensor, "vocab hidden"],
    targets: Int[Tensor, "tokens"],
    *,
    temperature: float = 1.0,
    chunk_size: int = CHUNK_SIZE,
    dtype: torch.dtype | None = None,
) -> Float[Tensor, "tokens"]:
    """Return the log-probabilities of :func:`chunked_logprobs`, [N], bit for bit.

    Skips the entropy, which takes longer than the rest of the softmax, and the gradient.
    """
    cast = head_weight.to(dtype or head_weight.dtype)
    parts = [torch.empty(0, device=hidden.device, dtype=torch.promote_types(hidden.dtype, torch.float32))]
    for start in range(0, len(targets), chunk_size):
        chunk = slice(start, start + chunk_size)
        logits = _head_product(hidden[chunk], cast).div_(temperature)
        logits.sub_(logits.amax(-1, keepdim=True))
        parts.append(logits.gather(-1, targets[chunk, None]).squeeze(-1) - logits.logsumexp(-1))
    return torch.cat(parts)


def _head_product(hidden: Tensor, cast: Tensor) -> Tensor:
    with no_autocast(hidden):
        return wide_product(hidden.to(cast.dtype), cast.T)


class _Logits(torch.autograd.Function):
    """Logits with gradients for states and ``head_weight``; ``cast`` is its copy in the precision of the product.

    Autograd's gradient of a weight that is cast once would be summed over the chunks in half precision.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head_weight: Tensor, cast: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, cast)
        return _head_product(hidden, cast)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, cast = ctx.saved_tensors
        gradient = gradients[0].to(cast.dtype)
        with no_autocast(hidden):
            of_hidden = wide_product(gradient, cast).to(hidden.dtype) if ctx.needs_input_grad[0] else None
            of_weight = wide_product(gradient.T, hidden.to(cast.dtype)) if ctx.needs_input_grad[1] else None
        return of_hidden, of_weight, None


def _logprobs_of_chunk(
    hidden: Tensor,
    head_weight: Tensor,
    cast: Tensor,
    targets: Tensor,
    temperature: float,
    entropy_gradient: bool,
) -> tuple[Tensor, Tensor]:
    logits: Tensor = _Logits.apply(hidden, head_weight, cast)  # type: ignore[no-untyped-call]
    logits = logits / temperature
    # A maximum of 0 keeps small probabilities exact, in the entropy and in the gradient.
    logits = logits - logits.detach().amax(-1, keepdim=True)
    log_normaliser = logits.logsumexp(-1)
    logprobs = logits.gather(-1, targets[:, None]).squeeze(-1) - log_normaliser
    if not entropy_gradient:
        logits, log_normaliser = logits.detach(), log_normaliser.detach()
    # H = log Z - E[logit]
    probabilities = (logits - log_normaliser[:, None]).exp()
    return logprobs, log_normaliser - (probabilities * logits).sum(-1)


def fused_loss(
    hidden: Float[Tensor, "tokens hidden"],
    head_weight: Float[Tensor, "vocab hidden"],
    targets: Int[Tensor, "tokens"],
    loss_of: LossOfChunk,
    *,
    lengths: Sequence[int],
    temperature: float = 1.0,
    dtype: torch.dtype | None = None,
) -> Float[Tensor, ""]:
    """Return the sum of ``loss_of`` over chunks of whole sequences, computing the gradient in the same pass.

    Args:
        loss_of: (slice of N, log-probabilities [n] with gradient, entropies [n] without) -> scalar. Called once per
            chunk.
        lengths: Tokens of each sequence; they add up to N.

    Otherwise as :func:`chunked_logprobs`.
    """
    arguments = (hidden, head_weight, targets, loss_of, tuple(lengths), temperature, dtype or head_weight.dtype)
    loss: Tensor = _FusedLoss.apply(*arguments)  # type: ignore[no-untyped-call]
    return loss


def fits(lengths: Sequence[int]) -> bool:
    """Return True if every sequence fits into one chunk."""
    return max(lengths, default=0) <= CHUNK_SIZE


class _FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head_weight: Tensor,
        targets: Tensor,
        loss_of: LossOfChunk,
        lengths: tuple[int, ...],
        temperature: float,
        dtype: torch.dtype,
    ) -> Tensor:
        loss = at_least_float32(hidden.new_zeros(()))
        hidden_gradient = at_least_float32(torch.empty_like(hidden))
        weight_gradient = at_least_float32(torch.zeros_like(head_weight)) if ctx.needs_input_grad[1] else None
        cast = head_weight.to(dtype)
        with no_autocast(hidden):
            for chunk in _chunks(lengths):
                rows, target_ids = hidden[chunk].to(dtype), targets[chunk, None]
                powers = wide_product(rows, cast.T).div_(temperature)
                logprobs, entropy, total = _exponentiate(powers, target_ids)
                part, slope = _differentiate(loss_of, chunk, logprobs, entropy)
                loss += part
                pull = slope / (total * temperature)
                below = powers.scatter_add_(-1, target_ids, -total).to(dtype)
                del powers
                hidden_gradient[chunk] = -pull * wide_product(below, cast)
                if weight_gradient is not None:
                    unit = (
                        pull.abs().amax().clamp(min=torch.finfo(pull.dtype).tiny)
                    )  # small numbers underflow in float16
                    pulled = (rows * (pull / unit)).to(dtype)
                    for start in range(0, len(cast), _TOKENS):
                        tokens = slice(start, start + _TOKENS)
                        weight_gradient[tokens].sub_(wide_product(below[:, tokens].T, pulled).mul_(unit))
        ctx.save_for_backward(hidden_gradient, weight_gradient)
        ctx.dtypes = hidden.dtype, head_weight.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        of_hidden, of_weight = ctx.saved_tensors
        (factor,) = gradients
        hidden_dtype, weight_dtype = ctx.dtypes
        scaled_weight = None if of_weight is None else of_weight.mul_(factor).to(weight_dtype)
        return (of_hidden * factor).to(hidden_dtype), scaled_weight, None, None, None, None, None


def _exponentiate(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probabilities and entropies, [n] each, and Z [n, 1]; ``logits`` [n, V] become e in place."""
    logits.sub_(logits.amax(-1, keepdim=True))
    chosen = logits.gather(-1, targets)
    energy = torch.empty_like(chosen)
    for start in range(0, len(logits), _BLOCK):
        block = slice(start, start + _BLOCK)
        before = logits[block].clone()
        torch.linalg.vecdot(logits[block].exp_(), before, out=energy[block, 0])
    total = logits.sum(-1, keepdim=True)
    log_total = total.log()
    return (chosen - log_total)[:, 0], (log_total - energy / total)[:, 0], total


@torch.enable_grad()
def _differentiate(loss_of: LossOfChunk, chunk: slice, logprobs: Tensor, entropy: Tensor) -> tuple[Tensor, Tensor]:
    leaf = logprobs.detach().requires_grad_()
    loss = loss_of(chunk, leaf, entropy.detach())
    (slope,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), slope[:, None]


def _chunks(lengths: Sequence[int]) -> Iterator[slice]:
    """Yield slices of whole sequences with at most ``_ROWS`` tokens; a longer one is its own chunk."""
    start = end = 0
    for length in lengths:
        if end > start and end + length - start > _ROWS:
            yield slice(start, end)
            start = end
        end += length
    if end > start:
        yield slice(start, end)

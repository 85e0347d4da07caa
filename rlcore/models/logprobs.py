"""Log-probabilities and entropy from hidden states, in chunks, so that the [N, V] logits are never all in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rlcore.hardware.memory import CHUNK_SIZE
from rlcore.hardware.precision import no_autocast, wide_product

if TYPE_CHECKING:
    from jaxtyping import Float, Int


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

    Args:
        hidden: [N, H], states that predict the targets.
        head_weight: [V, H].
        targets: int64 [N].
        temperature: Temperature of the sampled distribution.
        chunk_size: Number of rows whose [chunk, V] logits are in memory together. The backward pass recomputes them.
        entropy_gradient: Differentiate the entropy, which costs a second softmax backward.
        dtype: dtype of the products with the head; by default that of ``head_weight``.

    Returns:
        logprobs, entropy: float32 [N] each, in nats (float64 for a float64 model).
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
    """Return logits [N, V], at least float32, from states [N, H] and the cast head weight."""
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

"""Log-probabilities and entropy from hidden states, in chunks: the [N, V] logits never stand in memory as a whole."""

from __future__ import annotations

import torch
from torch.utils.checkpoint import checkpoint

CHUNK_SIZE = 1024  # rows of logits [chunk, V] in memory at once: 200 MB at a vocabulary of 49,152


def chunked_logprobs(
    hidden: torch.Tensor,
    head_weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    temperature: float = 1.0,
    chunk_size: int = CHUNK_SIZE,
    entropy_gradient: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each target and entropy of each ``softmax(hidden @ head_weight.T / temperature)``.

    Args:
        hidden: [N, H], the states that predict the targets.
        head_weight: [V, H].
        targets: int64 [N].
        temperature: of the distribution that was sampled from.
        chunk_size: how many of the N rows have their [chunk, V] logits in memory at once; the backward pass computes
            them again instead of keeping them.
        entropy_gradient: whether the entropy is to be differentiated (it costs a second softmax backward).

    Returns:
        logprobs, entropy: float32 [N] each, in nats (float64 for a float64 model).
    """
    results = [
        checkpoint(
            _logprobs_of_chunk,
            hidden[start : start + chunk_size],
            head_weight,
            targets[start : start + chunk_size],
            temperature,
            entropy_gradient,
            use_reentrant=False,
            preserve_rng_state=False,
        )
        for start in range(0, len(targets), chunk_size)
    ]
    logprobs, entropy = zip(*results, strict=True)
    return torch.cat(logprobs), torch.cat(entropy)


@torch.no_grad()
def target_logprobs(
    hidden: torch.Tensor,
    head_weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    temperature: float = 1.0,
    chunk_size: int = CHUNK_SIZE,
) -> torch.Tensor:
    """The log-probabilities of :func:`chunked_logprobs` bit for bit, [N], where nothing else is wanted.

    Without the entropy, which takes longer than the rest of the softmax, and without a gradient.
    """
    parts = [torch.empty(0, device=hidden.device, dtype=torch.promote_types(hidden.dtype, torch.float32))]
    for start in range(0, len(targets), chunk_size):
        chunk = slice(start, start + chunk_size)
        logits = at_least_float32(hidden[chunk] @ head_weight.T).div_(temperature)
        parts.append(logits.gather(-1, targets[chunk, None]).squeeze(-1) - logits.logsumexp(-1))
    return torch.cat(parts)


def _logprobs_of_chunk(
    hidden: torch.Tensor, head_weight: torch.Tensor, targets: torch.Tensor, temperature: float, entropy_gradient: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = at_least_float32(hidden @ head_weight.T) / temperature
    log_normaliser = logits.logsumexp(-1)
    logprobs = logits.gather(-1, targets[:, None]).squeeze(-1) - log_normaliser
    if not entropy_gradient:
        logits, log_normaliser = logits.detach(), log_normaliser.detach()
    # H = log Z - E[logit]
    probabilities = (logits - log_normaliser[:, None]).exp()
    return logprobs, log_normaliser - (probabilities * logits).sum(-1)


def at_least_float32(values: torch.Tensor) -> torch.Tensor:
    """Half precision to float32; float64 stays, so that exactness can be checked in it."""
    return values.to(torch.promote_types(values.dtype, torch.float32))

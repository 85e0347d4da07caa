"""Causal language model as a policy: log-probabilities of the completion tokens of a packed batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlcore.errors import ModelError
from rlcore.hardware.out_of_memory import oom_retry
from rlcore.hardware.precision import autocast, compute_dtype
from rlcore.hardware.sharded import backbone, device_of, run_forward
from rlcore.models.architectures import logit_scale, pack_for, supports_prompt_sharing
from rlcore.models.logprobs import LossOfChunk, chunked_logprobs, fits, fused_loss, target_logprobs
from rlcore.models.tree_attention import TREE_ATTENTION, layout_of
from rlcore.progress import advance
from rlcore.text.packing import PackedBatch, TokenSequence

if TYPE_CHECKING:
    from jaxtyping import Float


def hidden_states(model: PreTrainedModel, batch: PackedBatch) -> Float[Tensor, "batch time hidden"]:
    """Return the last hidden states of the backbone, [B, T, H], with tree attention if the model supports it.

    Raises:
        ModelError: Completions share a row, but the model does not support prompt sharing.
    """
    with autocast(model):
        output = backbone(model)(input_ids=batch.token_ids, use_cache=False, **_sight(model, batch))
    states: Tensor = output.last_hidden_state
    return states


def _sight(model: PreTrainedModel, batch: PackedBatch) -> dict[str, Any]:
    if not supports_prompt_sharing(model):
        if batch.shares_prompts:
            raise ModelError(f"a row of {type(model).__name__} holds one completion", fix="use pack_for")
        return {}  # a row is causal, with padding at its end
    by_tree = model.config._attn_implementation == TREE_ATTENTION
    mask = {"attention_mask": batch.segment[:, None, None], "tree": layout_of(batch.segment)} if by_tree else {}
    return {"position_ids": batch.position_ids, **(mask or {"attention_mask": batch.attention_mask})}


def completion_logprobs(
    model: PreTrainedModel, batch: PackedBatch, *, temperature: float = 1.0, entropy_gradient: bool = False
) -> tuple[Float[Tensor, "tokens"], Float[Tensor, "tokens"]]:
    """Return log-probability and entropy of each completion token in nats, [N] each, in order of ``batch.targets``.

    float32 in any model precision, but float64 for a float64 model.
    """
    states = completion_states(model, batch)
    return state_logprobs(model, states, batch, temperature=temperature, entropy_gradient=entropy_gradient)


def completion_states(model: PreTrainedModel, batch: PackedBatch) -> Float[Tensor, "tokens hidden"]:
    """Return the hidden states that predict the completion tokens, [N, H]."""
    return hidden_states(model, batch).flatten(0, 1)[batch.predictors]


def state_logprobs(
    model: PreTrainedModel,
    states: Float[Tensor, "tokens hidden"],
    batch: PackedBatch,
    *,
    temperature: float = 1.0,
    entropy_gradient: bool = False,
) -> tuple[Float[Tensor, "tokens"], Float[Tensor, "tokens"]]:
    """Return :func:`completion_logprobs` from precomputed states [N, H]."""
    head = model.get_output_embeddings()
    return chunked_logprobs(
        states,
        head.weight,
        batch.targets,
        temperature=temperature / logit_scale(model.config),
        entropy_gradient=entropy_gradient,
        dtype=compute_dtype(model),
    )


def state_scores(
    model: PreTrainedModel, states: Float[Tensor, "tokens hidden"], batch: PackedBatch, *, temperature: float = 1.0
) -> Float[Tensor, "tokens"]:
    """Return the log-probabilities of :func:`state_logprobs`, [N], without gradient or entropy."""
    head, dtype = model.get_output_embeddings(), compute_dtype(model)
    scaled = temperature / logit_scale(model.config)
    return target_logprobs(states, head.weight, batch.targets, temperature=scaled, dtype=dtype)


def completion_loss(
    model: PreTrainedModel,
    states: Float[Tensor, "tokens hidden"],
    batch: PackedBatch,
    loss_of: LossOfChunk,
    *,
    temperature: float = 1.0,
    entropy_gradient: bool = False,
    by_token: bool = False,
) -> Float[Tensor, ""]:
    """Return a scalar loss of the completion tokens from their states [N, H].

    ``loss_of`` gets slices of whole sequences, or any slices if ``by_token``: no token's loss depends on another.
    ``entropy_gradient`` costs a fourth product.
    """
    owners = batch.sequence_index.tolist()
    lengths = [1] * len(owners) if by_token else [len(list(run)) for _, run in groupby(owners)]
    if entropy_gradient or not fits(lengths):
        logprobs, entropy = state_logprobs(
            model, states, batch, temperature=temperature, entropy_gradient=entropy_gradient
        )
        return loss_of(slice(0, batch.num_tokens), logprobs, entropy)
    head = model.get_output_embeddings()
    return fused_loss(
        states,
        head.weight,
        batch.targets,
        loss_of,
        lengths=lengths,
        temperature=temperature / logit_scale(model.config),
        dtype=compute_dtype(model),
    )


def score_sequences(
    model: PreTrainedModel, sequences: Sequence[TokenSequence], *, tokens_per_microbatch: int, temperature: float = 1.0
) -> list[Float[Tensor, "_time"]]:
    """Return log-probabilities of completions without gradient: one float32 [T] tensor on the CPU per sequence."""

    def score(batch: PackedBatch) -> tuple[Tensor]:
        return (state_scores(model, completion_states(model, batch), batch, temperature=temperature),)

    (results,) = score_tokens(model, sequences, score, tokens_per_microbatch=tokens_per_microbatch)
    return results


def score_tokens(
    model: nn.Module,
    sequences: Sequence[TokenSequence],
    score: Callable[[PackedBatch], tuple[Tensor, ...]],
    *,
    tokens_per_microbatch: int,
    count: int = 1,
) -> tuple[list[Float[Tensor, "_time"]], ...]:
    """Return ``count`` results of ``score``, [N] each, by sequence: one float32 [T] tensor on the CPU for each."""
    columns = tuple([torch.empty(len(each.completion_ids)) for each in sequences] for _ in range(count))
    for batch, found in score_batches(model, sequences, score, tokens_per_microbatch=tokens_per_microbatch):
        numbers = batch.sequences.tolist()
        for results, values in zip(columns, found, strict=True):
            pieces = torch.split(values, [len(results[number]) for number in numbers])
            for number, piece in zip(numbers, pieces, strict=True):
                results[number].copy_(piece)
    return columns


@oom_retry
@torch.no_grad()
def score_batches(
    model: nn.Module,
    sequences: Sequence[TokenSequence],
    score: Callable[[PackedBatch], tuple[Tensor, ...]],
    *,
    tokens_per_microbatch: int,
) -> list[tuple[PackedBatch, list[Float[Tensor, "..."]]]]:
    """Return each packed batch with the results of ``score`` on the CPU, without gradient."""
    scored = []
    batches = pack_for(getattr(model, "backbone", model), sequences, tokens_per_microbatch=tokens_per_microbatch)
    for number, batch in enumerate(batches):
        advance("scored batches", number, len(batches))
        found = run_forward(model, partial(score, batch.to(device_of(model))))
        scored.append((batch, [values.detach().to("cpu", torch.get_default_dtype()) for values in found]))
    return scored

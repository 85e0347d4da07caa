"""Packing and attention by model: trees with our kernels, or one completion per row with the library's."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from rlcore.hardware.memory import filled_on, positions_on
from rlcore.hardware.precision import use_onednn
from rlcore.hardware.sharded import device_of, ranks_of
from rlcore.models.architectures import is_recurrent, library_attention, supports_prompt_sharing
from rlcore.models.tree_attention import TREE_ATTENTION, WIDTHS
from rlcore.text.packing import EXACT, PackedBatch, TokenSequence, empty, pack, split_across_ranks

logger = logging.getLogger(__name__)


def choose_kernels(model: PreTrainedModel) -> None:
    """Set the fastest attention and products that are correct for the model; a slow attention is logged once."""
    use_onednn(model)
    if supports_prompt_sharing(model):
        model.set_attn_implementation(TREE_ATTENTION)
        return
    if model._can_set_attn_implementation():
        model.set_attn_implementation(library_attention(model))
    _log_slow(type(model).__name__, is_recurrent(model))


@functools.cache
def _log_slow(name: str, has_state: bool) -> None:
    reason = "keeps a state from token to token" if has_state else "has a custom attention"
    logger.warning("%s %s: each completion gets its own row and recomputes its prompt", name, reason)


def pack_for(model: Any, sequences: Sequence[TokenSequence], *, tokens_per_microbatch: int) -> list[PackedBatch]:
    """Pack sequences for ``model`` (:func:`rlcore.text.packing.pack`), on a GPU with its kernel's few widths.

    All ranks of a model get equally many batches, because passes through shards are collective.
    """
    share_prompts = supports_prompt_sharing(model)
    device: torch.device = device_of(model)
    widths = WIDTHS if share_prompts and device.type == "cuda" else EXACT
    batches = pack(
        sequences,
        tokens_per_microbatch=positions_on(device.type, tokens_per_microbatch),
        filled=filled_on(device.type, tokens_per_microbatch),
        share_prompts=share_prompts,
        widths=widths,
    )
    missing = ranks_of(model).max(len(batches)) - len(batches)
    return batches + [empty(widths)] * missing


def rank_indices(model: Any, sequences: Sequence[TokenSequence], *, tokens_per_microbatch: int) -> list[int]:
    """Return the indices of the sequences that this rank processes; all of them without other ranks."""
    ranks, share_prompts = ranks_of(model), supports_prompt_sharing(model)
    budget = positions_on(device_of(model).type, tokens_per_microbatch)
    assigned = split_across_ranks(sequences, ranks.size, tokens_per_microbatch=budget, share_prompts=share_prompts)
    return assigned[ranks.rank]

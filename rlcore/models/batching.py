"""How a model is handed sequences: as trees with our attention, or a completion a row with the library's."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from rlcore.distributed.sharded import device_of, ranks_of
from rlcore.models.architectures import is_recurrent, library_attention, supports_prompt_sharing
from rlcore.models.tree_attention import TREE_ATTENTION, WIDTHS
from rlcore.text.packing import EXACT, PackedBatch, TokenSequence, empty, pack, split_across_ranks

logger = logging.getLogger(__name__)


def choose_attention(model: PreTrainedModel) -> None:
    """Set the fastest attention that is right for the model; a slow one is said once in the log."""
    if supports_prompt_sharing(model):
        model.set_attn_implementation(TREE_ATTENTION)
        return
    if model._can_set_attn_implementation():
        model.set_attn_implementation(library_attention(model))
    _say_slow(type(model).__name__, is_recurrent(model))


@functools.cache
def _say_slow(name: str, has_state: bool) -> None:
    reason = "hands a state on from token to token" if has_state else "has an attention of its own"
    logger.warning("%s %s: every completion gets a row of its own, with its prompt computed again", name, reason)


def pack_for(model: Any, sequences: Sequence[TokenSequence], *, tokens_per_microbatch: int) -> list[PackedBatch]:
    """:func:`rlcore.text.packing.pack` for ``model``; on a GPU with the few widths that its kernel is compiled for.

    Every one of the model's ranks gets equally many: passes through shards are theirs together.
    """
    shares = supports_prompt_sharing(model)
    device: torch.device = device_of(model)
    widths = WIDTHS if shares and device.type == "cuda" else EXACT
    batches = pack(sequences, tokens_per_microbatch=tokens_per_microbatch, share_prompts=shares, widths=widths)
    missing = ranks_of(model).max(len(batches)) - len(batches)
    return batches + [empty(widths)] * missing


def share_for(model: Any, sequences: Sequence[TokenSequence], *, tokens_per_microbatch: int) -> list[int]:
    """The numbers of the sequences that this rank passes through ``model``; all of them where it is alone."""
    ranks, shares = ranks_of(model), supports_prompt_sharing(model)
    dealt = split_across_ranks(sequences, ranks.size, tokens_per_microbatch=tokens_per_microbatch, share_prompts=shares)
    return dealt[ranks.rank]

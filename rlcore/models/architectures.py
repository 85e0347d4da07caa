"""Properties of architectures, and packing and attention by them.

A row of most models may be a tree: a prompt once, with all of its completions. Models with a state from token to token
(Mamba, linear attention, short convolutions) or an attention that only transformers computes (soft-caps, sinks, latent
keys, ALiBi, chunks) have one completion per row and the library's slower attention.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from rlcore.hardware.memory import filled_on, positions_on
from rlcore.hardware.precision import use_onednn
from rlcore.hardware.sharded import device_of, ranks_of
from rlcore.models.tree_attention import TREE_ATTENTION, WIDTHS
from rlcore.text.packing import EXACT, PackedBatch, TokenSequence, empty, pack, split_across_ranks

logger = logging.getLogger(__name__)
_TREE_LAYERS = frozenset(("full_attention", "sliding_attention", "sparse", "dense"))
# Configuration fields of attention that the tree kernels do not compute.
_OTHER_ATTENTION = ("attn_logit_softcapping", "kv_lora_rank", "alibi", "attention_chunk_size")
# Soft-caps of the final logits.
_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
_OWN_ATTENTION = frozenset(("diffllama", "doge", "nemotron"))  # no field declares it
_WINDOW_IN_MASK = frozenset(("phimoe", "qwen2_moe"))  # their layers do not pass their window
_SCALES: dict[str, Callable[[Any], float]] = {
    "granite": lambda config: 1.0 / config.logits_scaling,
    "granitemoe": lambda config: 1.0 / config.logits_scaling,
    "granitemoeshared": lambda config: 1.0 / config.logits_scaling,
    "granitemoehybrid": lambda config: 1.0 / config.logits_scaling,
    "granite_swa": lambda config: 1.0 / config.logits_scaling,
    "minicpm3": lambda config: 1.0 / config.logits_scaling,
    "cohere": lambda config: config.logit_scale,
    "cohere2": lambda config: config.logit_scale,
    "falcon_h1": lambda config: config.lm_head_multiplier,
    "hyperclovax": lambda config: config.logits_scaling,
}


def supports_prompt_sharing(model: Any) -> bool:
    """Return True if completions of one prompt may share a row, and one copy of its keys when decoding."""
    base = getattr(model, "base", model)
    config = _text(base.config)
    return (
        set(getattr(config, "layer_types", None) or ()) <= _TREE_LAYERS
        and not is_recurrent(base)
        and not any(getattr(config, name, None) for name in _OTHER_ATTENTION)
        and not (config.model_type in _WINDOW_IN_MASK and _has_window(config))
        and config.model_type not in _OWN_ATTENTION
        and base._can_set_attn_implementation()  # else the attention is custom code
        and base._supports_attention_backend  # else layers do not pass what our kernels need
        and base._supports_sdpa
    )


def is_recurrent(model: PreTrainedModel) -> bool:
    """Return True if the model keeps a state from token to token, so that completions in one row would mix."""
    kinds = set(getattr(_text(model.config), "layer_types", None) or ())
    return bool(model._is_stateful or kinds & {"linear_attention", "conv", "hybrid", "hybrid_sliding"})


def library_attention(model: PreTrainedModel) -> str:
    """Return the transformers attention that computes this model fully; SDPA would drop soft-caps."""
    caps = getattr(_text(model.config), "attn_logit_softcapping", None)
    return "sdpa" if model._supports_sdpa and not caps else "eager"


def unsupported_reason(model: PreTrainedModel) -> str:
    """Return why the logits are not the product of hidden states and head; empty if they are."""
    head = model.get_output_embeddings()
    if head is None:
        return "has no language model head"
    if getattr(head, "bias", None) is not None:
        return "adds a bias to its logits, which is not computed"
    if any(getattr(_text(model.config), name, None) for name in _CAPS):
        return "caps its logits, which is not computed"
    return ""


def logit_scale(config: PreTrainedConfig) -> float:
    """Return the factor of the logits: 1 except for Granite, Cohere, Falcon-H1 and others."""
    text = _text(config)
    scale = _SCALES.get(text.model_type)
    return 1.0 if scale is None else float(scale(text))


def max_positions(config: PreTrainedConfig) -> int | None:
    """Return the maximum number of tokens of the model, or None if unbounded, as in recurrent models."""
    for name in ("max_position_embeddings", "max_seq_len", "n_positions", "seq_length"):
        if value := getattr(_text(config), name, None):
            return int(value)
    return None


def positions_of(folder: Path) -> int:
    """Return the maximum number of tokens of a checkpoint's model; ``sys.maxsize`` if unbounded."""
    return max_positions(AutoConfig.from_pretrained(folder, local_files_only=True)) or sys.maxsize


def _text(config: PreTrainedConfig) -> Any:
    return config.get_text_config(decoder=True)


def _has_window(config: PreTrainedConfig) -> bool:
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    positions = max_positions(config)
    if not window or (positions is not None and window >= positions):
        return False
    return not kinds or "sliding_attention" in kinds


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

"""What has to be known of an architecture beyond its forward pass: rows, attention, head, positions.

Most models are attention over all earlier tokens and nothing else. Then a row of a batch may be a tree: a prompt once,
with all of its completions. Others keep a state from token to token (Mamba, linear attention, short convolutions), or
have an attention that only the library's own code computes (soft-caps, sinks, latent keys, ALiBi, chunks). They get a
row for each completion and the library's attention, which is slower and right.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

_TREE_LAYERS = frozenset(("full_attention", "sliding_attention", "sparse", "dense"))
# Fields of a configuration that say of an attention what the kernels for trees do not compute.
_OTHER_ATTENTION = ("attn_logit_softcapping", "kv_lora_rank", "alibi", "attention_chunk_size")
# What the final logits are capped at.
_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
_OWN_ATTENTION = frozenset(("diffllama", "doge", "nemotron"))  # they do not say so
_WINDOW_IN_MASK = frozenset(("phimoe", "qwen2_moe"))  # their layers do not say how far they look back
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


def backbone(model: Any) -> Callable[..., Any]:
    """The model without its head. Some classes name another attribute as their base, and then name themselves.

    A model that has no head is its own backbone.
    """
    base = model.base_model
    part: Callable[..., Any] = getattr(model, "model", base) if base is model else base
    return part


def supports_prompt_sharing(model: Any) -> bool:
    """Whether completions of one prompt may stand in one row, and be decoded over one copy of its keys.

    ``model``: a language model, or one that has an adapter on.
    """
    base = getattr(model, "base", model)
    config = _text(base.config)
    return (
        set(getattr(config, "layer_types", None) or ()) <= _TREE_LAYERS
        and not is_recurrent(base)
        and not any(getattr(config, name, None) for name in _OTHER_ATTENTION)
        and not (config.model_type in _WINDOW_IN_MASK and _has_window(config))
        and config.model_type not in _OWN_ATTENTION
        and base._can_set_attn_implementation()  # otherwise its attention is its own code
        and base._supports_attention_backend  # otherwise its layers do not hand on what our kernels need
        and base._supports_sdpa
    )


def is_recurrent(model: PreTrainedModel) -> bool:
    """Whether a state is handed on from token to token, so that completions in one row would read each other's."""
    kinds = set(getattr(_text(model.config), "layer_types", None) or ())
    return bool(model._is_stateful or kinds & {"linear_attention", "conv", "hybrid", "hybrid_sliding"})


def library_attention(model: PreTrainedModel) -> str:
    """The library's attention that computes all of what the model asks for: its SDPA drops soft-caps."""
    caps = getattr(_text(model.config), "attn_logit_softcapping", None)
    return "sdpa" if model._supports_sdpa and not caps else "eager"


def unsupported_reason(model: PreTrainedModel) -> str:
    """Why a model's logits are not the product of hidden states and head; empty where nothing speaks against it."""
    head = model.get_output_embeddings()
    if head is None:
        return "has no language model head"
    if getattr(head, "bias", None) is not None:
        return "adds a bias to its logits, which is not computed"
    if any(getattr(_text(model.config), name, None) for name in _CAPS):
        return "caps its logits, which is not computed"
    return ""


def logit_scale(config: PreTrainedConfig) -> float:
    """What the product of hidden states and head is multiplied by: 1 but for Granite, Cohere, Falcon-H1 and others."""
    text = _text(config)
    scale = _SCALES.get(text.model_type)
    return 1.0 if scale is None else float(scale(text))


def max_positions(config: PreTrainedConfig) -> int | None:
    """How many tokens the model reads; None where there is no bound, as in a recurrent model."""
    for name in ("max_position_embeddings", "max_seq_len", "n_positions", "seq_length"):
        if value := getattr(_text(config), name, None):
            return int(value)
    return None


def positions_of(folder: Path) -> int:
    """How many tokens a checkpoint's model reads; ``sys.maxsize`` where there is no bound."""
    return max_positions(AutoConfig.from_pretrained(folder, local_files_only=True)) or sys.maxsize


def _text(config: PreTrainedConfig) -> Any:
    """The part of a configuration that is about text: all of it, but for a model that also sees or hears."""
    return config.get_text_config(decoder=True)


def _has_window(config: PreTrainedConfig) -> bool:
    """Whether some layer looks back over fewer tokens than the model reads."""
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    positions = max_positions(config)
    if not window or (positions is not None and window >= positions):
        return False
    return not kinds or "sliding_attention" in kinds

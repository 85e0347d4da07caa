"""A tiny model of every architecture, from a random configuration, and what docs/models.md says of each.

``python -m tests.rlcore.models.zoo`` prints the table of the documentation.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCABULARY = 60
COMMON: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOW = {"sliding_window": 4}  # shorter than the sequences
HALF_WINDOW = {"sliding_window": 4, "use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
ROUTED = EXPERTS | {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
LATENT = {
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "head_dim": 8,
    "num_key_value_heads": 4,
}
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 4,
}
DELTA = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One row of the table.

    ``shares``: several completions share a row and a prompt's keys. ``refused``: part of what the check says.
    ``adapter``: "yes", "part" (experts or mixers keep their weights) or "no". ``decoding_bound``: nats; the library's
    own decoding may differ from its forward pass.
    """

    name: str
    model_type: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    shares: bool = True
    refused: str = ""
    adapter: str = "yes"
    decoding_bound: float = 5e-5
    remark: str = ""


def _of(name: str, model_type: str, *settings: Mapping[str, Any], **facts: Any) -> Architecture:
    merged: dict[str, Any] = {}
    for each in settings:
        merged |= each
    return Architecture(name=name, model_type=model_type, settings=merged, **facts)


_STATE = {"shares": False, "remark": "recurrent state"}
_OWN = {"shares": False, "remark": "custom attention"}
_MIX = {"adapter": "part", "remark": "mixture of experts"}
_CAPS = {"shares": False, "refused": "caps its logits", "remark": "final soft-cap"}

# fmt: off
ARCHITECTURES = (
    # attention over all earlier tokens
    _of("Llama 2, 3", "llama"),
    _of("Qwen2, Qwen2.5", "qwen2", HALF_WINDOW, remark="windows"),
    _of("Qwen3", "qwen3"),
    _of("Mistral", "mistral", WINDOW, remark="windows"),
    _of("Ministral", "ministral", WINDOW, remark="windows"),
    _of("Ministral 3", "ministral3"),
    _of("Gemma 1", "gemma"),
    _of("Gemma 3 text", "gemma3_text", WINDOW, remark="windows"),
    _of(
        "Gemma 4 text",
        "gemma4_text",
        WINDOW,
        {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8, "global_head_dim": 16},
        remark="windows",
    ),
    _of("Phi-3, Phi-4", "phi3", WINDOW, remark="windows"),
    _of("SmolLM3", "smollm3", HALF_WINDOW, remark="windows"),
    _of("OLMo 1", "olmo"),
    _of("OLMo 2", "olmo2"),
    _of("OLMo 3", "olmo3", WINDOW, remark="windows"),
    _of("GLM", "glm"),
    _of("GLM-4", "glm4"),
    _of("ERNIE 4.5", "ernie4_5"),
    _of("Hunyuan dense", "hunyuan_v1_dense"),
    _of("EXAONE 4", "exaone4", WINDOW, remark="windows"),
    _of("Seed-OSS", "seed_oss"),
    _of("Apertus", "apertus"),
    _of("Arcee", "arcee"),
    _of("StarCoder2", "starcoder2", WINDOW, remark="windows"),
    _of("OPT", "opt", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    _of("GPT-NeoX, Pythia", "gpt_neox"),
    _of("GPT-2", "gpt2", {"n_inner": 96}, adapter="no"),
    _of("GPT-BigCode", "gpt_bigcode"),
    _of("Granite 3", "granite", {"logits_scaling": 4.0}, remark="scaled logits"),
    _of("Cohere 1", "cohere", {"logit_scale": 0.25}, remark="scaled logits"),
    _of("Cohere 2", "cohere2", WINDOW, {"logit_scale": 0.25}, remark="windows, scaled logits"),
    _of("Persimmon", "persimmon"),
    _of("Helium", "helium"),
    _of("CWM", "cwm", WINDOW, remark="windows"),
    _of("Jais 2", "jais2"),
    _of("HyperCLOVA X", "hyperclovax", {"logits_scaling": 0.5}, remark="scaled logits"),
    # mixtures of experts
    _of("Qwen3-MoE", "qwen3_moe", EXPERTS, **_MIX),
    _of("Qwen2-MoE", "qwen2_moe", EXPERTS, {"shared_expert_intermediate_size": 32}, **_MIX),
    _of("Mixtral", "mixtral", EXPERTS, WINDOW, **_MIX),
    _of("OLMoE", "olmoe", EXPERTS, **_MIX),
    _of("MiniMax-M2", "minimax_m2", EXPERTS, **_MIX),
    _of("PhiMoE", "phimoe", EXPERTS, **_MIX),
    _of("GLM-4.5 MoE", "glm4_moe", ROUTED, **_MIX),
    _of("dots.llm1", "dots1", ROUTED, **_MIX),
    _of("Solar Open", "solar_open", ROUTED, **_MIX),
    _of(
        "EXAONE MoE", "exaone_moe", WINDOW, ROUTED,
        {"num_shared_experts": 1, "mlp_layer_types": ["dense", "sparse"]}, **_MIX,
    ),
    _of(
        "ERNIE 4.5 MoE", "ernie4_5_moe", EXPERTS, {"moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1},
        **_MIX,
    ),
    _of("Hunyuan MoE", "hunyuan_v1_moe", EXPERTS, {"moe_topk": 2}, **_MIX),
    _of("Granite 3 MoE", "granitemoe", EXPERTS, {"logits_scaling": 4.0}, **_MIX),
    _of(
        "Granite MoE, shared", "granitemoeshared", EXPERTS, {"logits_scaling": 4.0, "shared_intermediate_size": 32},
        **_MIX,
    ),
    _of("FlexOlmo", "flex_olmo", EXPERTS, **_MIX),
    # attention that only the library computes
    _of(
        "GPT-OSS", "gpt_oss", EXPERTS, WINDOW, shares=False, adapter="part",
        remark="sinks; mixture of experts",
    ),
    _of(
        "DeepSeek-V2", "deepseek_v2", ROUTED, LATENT, shares=False, adapter="part",
        remark="latent keys; mixture of experts",
    ),
    _of(
        "DeepSeek-V3", "deepseek_v3", ROUTED, LATENT, shares=False, adapter="part",
        remark="latent keys; mixture of experts",
    ),
    _of(
        "GLM-4.7 Flash", "glm4_moe_lite", ROUTED, LATENT, shares=False, adapter="part",
        remark="latent keys; mixture of experts",
    ),
    # The default of `dim_model_base` divides the logits of a model of 2,560 by 10; of one of 64 it would multiply them.
    _of("MiniCPM3", "minicpm3", {**LATENT, "dim_model_base": 16}, shares=False, remark="latent keys, scaled logits"),
    _of(
        "Llama 4 text", "llama4_text", EXPERTS, {"intermediate_size_mlp": 96, "num_hidden_layers": 4}, shares=False,
        adapter="part", remark="chunked attention; mixture of experts",
    ),
    _of("StableLM", "stablelm", **_OWN),
    _of(
        "Falcon", "falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "head_dim": None}, adapter="no",
        **_OWN,
    ),
    _of("BLOOM", "bloom", {"n_head": 4, "n_layer": 2}, **_OWN),
    _of("MPT", "mpt", {"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 256}, **_OWN),
    _of(
        "GPT-Neo", "gpt_neo",
        {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 4}, **_OWN,
    ),
    _of("Nemotron, Minitron", "nemotron", **_OWN),
    _of("DiffLlama", "diffllama", **_OWN),
    _of("Doge", "doge", **_OWN),
    _of("XGLM", "xglm", {"d_model": 64, "attention_heads": 4, "num_layers": 2, "ffn_dim": 96}, **_OWN),
    # layers with a state
    _of("Qwen3.5", "qwen3_5_text", DELTA, **_STATE),
    _of(
        "Qwen3.5-MoE", "qwen3_5_moe_text", DELTA, EXPERTS, {"shared_expert_intermediate_size": 32}, adapter="part",
        **_STATE,
    ),
    _of(
        "Qwen3-Next", "qwen3_next", DELTA, EXPERTS, {"shared_expert_intermediate_size": 32}, adapter="part",
        **_STATE,
    ),
    _of(
        "LFM2", "lfm2", {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
        **_STATE,
    ),
    _of(
        "LFM2-MoE", "lfm2_moe", EXPERTS, {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
        adapter="part", **_STATE,
    ),
    _of(
        "Granite 4", "granitemoehybrid", EXPERTS, MAMBA,
        {"layer_types": ["mamba", "attention"], "shared_intermediate_size": 32, "logits_scaling": 4.0},
        adapter="part", **_STATE,
    ),
    _of("OLMo hybrid", "olmo_hybrid", DELTA, {"linear_num_key_heads": 4}, **_STATE),
    _of(
        "Nemotron-H", "nemotron_h", EXPERTS,
        {
            "layers_block_type": ["mamba", "attention", "moe"], "num_hidden_layers": 3, "mamba_num_heads": 8,
            "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 1, "conv_kernel": 4, "chunk_size": 4,
            "n_routed_experts": 4, "moe_shared_expert_intermediate_size": 32,
        },
        shares=False, adapter="part", decoding_bound=5e-3,
        remark="recurrent state; transformers decodes 0.001 nats off its own forward pass",
    ),
    _of(
        "Falcon-H1", "falcon_h1", MAMBA, {"mamba_d_ssm": 128, "lm_head_multiplier": 0.5}, adapter="part",
        **_STATE,
    ),
    _of(
        "Jamba", "jamba",
        {
            "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
            "num_experts": 4, "num_experts_per_tok": 2, "mamba_d_state": 8, "mamba_dt_rank": 8,
            "use_mamba_kernels": False,
        },
        adapter="part", **_STATE,
    ),
    _of("Bamba", "bamba", MAMBA, {"attn_layer_indices": [1]}, adapter="part", **_STATE),
    _of(
        "MiniMax-01", "minimax", EXPERTS, {"layer_types": ["linear_attention", "full_attention"], "block_size": 4},
        adapter="part", **_STATE,
    ),
    _of("Mamba", "mamba", {"state_size": 8, "max_position_embeddings": None}, adapter="part", **_STATE),
    _of(
        "Mamba-2", "mamba2", {"num_heads": 8, "state_size": 8, "max_position_embeddings": None, "n_groups": 1,
        "chunk_size": 4, "expand": 2},
        adapter="part", **_STATE,
    ),
    # refused
    _of("Gemma 2", "gemma2", **_CAPS),
    _of("VaultGemma", "vaultgemma", **_CAPS),
    _of("NanoChat", "nanochat", shares=True, refused="caps its logits", remark="final soft-cap"),
    _of(
        "RecurrentGemma", "recurrent_gemma",
        {"lru_width": 64, "attention_window_size": 64, "conv1d_width": 4, "num_hidden_layers": 3}, **_CAPS,
    ),
    _of("Phi-1, Phi-2", "phi", refused="adds a bias to its logits", remark="head with a bias"),
    _of(
        "GPT-J", "gptj", {"rotary_dim": 8}, shares=False, refused="adds a bias to its logits",
        remark="head with a bias",
    ),
    _of(
        "CodeGen", "codegen", {"rotary_dim": 8}, shares=False, refused="adds a bias to its logits",
        remark="head with a bias",
    ),
)
# fmt: on
BY_TYPE: Mapping[str, Architecture] = {each.model_type: each for each in ARCHITECTURES}


@cache
def _made(model_type: str, settings: str) -> PreTrainedModel:
    """A model with biases and scales of norms away from 0 and 1, from settings in JSON."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **json.loads(settings)))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 or "bias" in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model.eval()


def make(architecture: Architecture) -> PreTrainedModel:
    """Random weights: a copy of a model that is made once for all tests."""
    settings = {key: value for key, value in {**COMMON, **architecture.settings}.items() if value is not None}
    return copy.deepcopy(_made(architecture.model_type, json.dumps(settings)))


def table() -> str:
    adapters = {"yes": "all linear layers", "part": "without experts and inner mixers", "no": "refused"}
    rows: dict[tuple[str, str, str], list[str]] = {}
    for each in ARCHITECTURES:
        training = "refused" if each.refused else "trees" if each.shares else "a completion a row"
        cells = (training, "–" if each.refused else adapters[each.adapter], each.remark or "–")
        rows.setdefault(cells, []).append(f"{each.name} (`{each.model_type}`)")
    lines = ["| training | LoRA | remark | architectures (`model_type`) |", "|---|---|---|---|"]
    lines += [f"| {' | '.join(cells)} | {', '.join(names)} |" for cells, names in rows.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(table())

"""TRL's own ways to be faster than its tuned base, by task: settings of its trainers.

The search tries each, and names the reason if one does not run or does other work.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_COMPILED = {"torch_compile": True}
_BY_LENGTH = {"train_sampling_strategy": "group_by_length"}
_LIGER = {"use_liger_kernel": True}
_PADDING_FREE = {"padding_free": True}
_PPO = {"passes of 16 rows": {"local_rollout_forward_batch_size": 16}}
OPTIONS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "grpo": {
        "continuous batching": {"use_transformers_continuous_batching": True},
        "static cache": {"cache_implementation": "static"},
        "torch.compile": _COMPILED,
        "liger": _LIGER,
        "hub kernels": {},  # a method of the model
        "padding-free": _PADDING_FREE,
        "vLLM": {"use_vllm": True, "vllm_mode": "colocate"},
        "defaults": {},  # nothing is tuned: bfloat16 by autocast, gradient checkpointing
    },
    "ppo": _PPO,
    "ppo_shared": _PPO,
    "sft": {
        "packing": {"packing": True, "max_length": 1024},
        "padding-free": {**_PADDING_FREE, "max_length": None},  # TRL refuses its default, which cuts no such row
        "grouped by length": _BY_LENGTH,
        "torch.compile": _COMPILED,
        "liger": _LIGER,
    },
    "rm": {"grouped by length": _BY_LENGTH, "padding-free": _PADDING_FREE, "torch.compile": _COMPILED, "liger": _LIGER},
    "dpo": {
        "precomputed reference": {"precompute_ref_log_probs": True},
        "grouped by length": _BY_LENGTH,
        "padding-free": _PADDING_FREE,
        "torch.compile": _COMPILED,
        "liger": _LIGER,
    },
}

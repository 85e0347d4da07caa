"""Size of a model, found without creating weights."""

from __future__ import annotations

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from rlcore.errors import ModelError
from rlcore.hardware.memory_plan import ModelSize
from rlcore.models.adapter_targets import linear_names


def model_size(config: PretrainedConfig) -> ModelSize:
    """Return the size of a model from its configuration.

    Raises:
        ModelError: It describes no causal language model.
    """
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # any of the class
        raise ModelError(
            f"config.json describes no causal language model ({config.model_type}): {str(error).partition(chr(10))[0]}",
            fix="take a decoder-only model, such as Llama or Qwen",
        ) from error
    config = config.get_text_config()
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    layers = [(path, m) for path, m in model.base_model.named_modules() if isinstance(m, nn.Linear)]
    return ModelSize(
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        num_layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        keys=width * (getattr(config, "num_key_value_heads", None) or heads),
        feed_forward=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        vocabulary=config.vocab_size,
        linear=tuple((path.rpartition(".")[2], m.in_features, m.out_features) for path, m in layers),
        adaptable=frozenset(linear_names(model)),
    )

"""What of a model is cut up by itself, and that a model without ranks is passed as it is."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen3Config,
)

from rlcore.errors import ModelError
from rlcore.models.heads import ScalarModel
from rlcore.models.sharded import _layers, _split, join, like, ranks_of, whole_pass, whole_state
from rlcore.ranks import ONE, Ranks
from tests import strategies

SMALL = {"vocab_size": 29, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SMALL, num_hidden_layers=3, num_key_value_heads=2),
        MixtralConfig(**SMALL, num_hidden_layers=3, num_key_value_heads=2, num_local_experts=8),  # more than layers
        GPT2Config(vocab_size=29, n_embd=16, n_layer=3, n_head=2),
    ],
)
def test_the_blocks_of_a_trunk_are_its_layers(config: PretrainedConfig) -> None:
    assert len(_layers(AutoModelForCausalLM.from_config(config))) == 3


def test_a_model_is_of_one_rank_until_it_joins_others_with_all_that_stands_on_it() -> None:
    model = strategies.tiny_llama()
    critic = ScalarModel.on_trunk(model)
    assert ranks_of(model) is ranks_of(critic) is ONE
    join(critic, Ranks(1, 2))
    assert ranks_of(model) == ranks_of(critic) == Ranks(1, 2)
    assert sum(1 for _ in model.parameters()) == sum(1 for _ in strategies.tiny_llama().parameters())


def test_a_model_that_is_whole_is_passed_and_kept_as_it_is() -> None:
    model, tensor = strategies.tiny_llama(), torch.ones(2)
    assert whole_pass(model, lambda: 5) == 5
    assert whole_state(model) is None
    assert like(model.lm_head.weight, tensor) is tensor


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (GPT2Config(vocab_size=29, n_embd=16, n_layer=1, n_head=2), "the library has no plan for it"),
        (Qwen3Config(**SMALL, num_hidden_layers=1, num_key_value_heads=2, head_dim=8), "its plan has replicated_with_"),
        (LlamaConfig(**SMALL, num_hidden_layers=1, num_key_value_heads=1), "it has 2 heads and 1 of keys"),
    ],
)
def test_a_model_that_cannot_be_split_is_refused_with_the_reason(
    config: PretrainedConfig, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DeviceMesh, "size", lambda self, mesh_dim=None: 2)
    with pytest.raises(ModelError, match=said) as refused:
        _split(AutoModelForCausalLM.from_config(config), object.__new__(DeviceMesh))
    assert "cannot be split among 2 ranks" in str(refused.value)

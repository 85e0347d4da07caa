"""Layers that are computed again: the same gradient to the last bit, far fewer activations, and copies that decode."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from rlcore.errors import ModelError
from rlcore.memory import measuring
from rlcore.models.policy import completion_logprobs
from rlcore.models.recompute import recompute_layers
from rlcore.packing import pack
from tests import strategies
from tests.rlcore.models.test_policy import gradients, packed_loss
from tests.rlcore.models.test_tree_attention import tree_llama


def test_the_gradient_is_the_same_to_the_last_bit() -> None:
    sequences = strategies.random_sequences(1, max_tokens=9)
    plain, again = tree_llama(), recompute_layers(tree_llama())
    assert torch.equal(
        gradients(packed_loss(again, sequences, 70), again), gradients(packed_loss(plain, sequences, 70), plain)
    )


def test_fewer_activations_are_kept() -> None:
    sequences = strategies.random_sequences(1, num_prompts=8, group_size=4, max_tokens=30)
    kept = []
    for model in (tree_llama(num_hidden_layers=6), recompute_layers(tree_llama(num_hidden_layers=6))):
        with measuring([model], []) as meter:
            (batch,) = pack(sequences, tokens_per_microbatch=10_000)
            completion_logprobs(model, batch)[0].sum().backward()
        kept.append(meter.activations)
    assert kept[1] < 0.5 * kept[0]


def test_dropout_stays_off() -> None:
    config = GPT2Config(vocab_size=29, n_embd=24, n_layer=2, n_head=4, n_positions=64, resid_pdrop=0.9, attn_pdrop=0.9)
    model = recompute_layers(GPT2LMHeadModel(config).eval())
    ids = torch.tensor([[1, 2, 3, 4]])
    assert torch.equal(model(ids, use_cache=False).logits, model(ids, use_cache=False).logits)


def test_a_copy_in_evaluation_mode_may_use_a_cache() -> None:
    copied = copy.deepcopy(recompute_layers(tree_llama())).eval()
    assert copied(torch.tensor([[1, 2, 3]]), use_cache=True).past_key_values is not None


def test_an_architecture_that_cannot_is_refused() -> None:
    model = strategies.tiny_llama()
    model.supports_gradient_checkpointing = False
    with pytest.raises(ModelError, match="recompute_layers = false"):
        recompute_layers(model)

"""Layers that are computed again: the same gradient to the last bit, far fewer activations, and copies that decode."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel, LlamaForCausalLM, PreTrainedModel

from rlcore.config import LoraConfig
from rlcore.errors import ModelError
from rlcore.hardware.memory_meter import measure_peak
from rlcore.models.gradient_checkpointing import enable_gradient_checkpointing
from rlcore.models.lora import AdaptedModel, active_name, add_lora
from rlcore.models.policy import completion_logprobs
from rlcore.sampling.kv_cache import cache_argument
from rlcore.text.packing import PackedBatch, pack
from tests import strategies
from tests.rlcore.models.packed import gradients, packed_loss
from tests.rlcore.models.test_tree_attention import tree_llama


def test_the_gradient_is_the_same_to_the_last_bit() -> None:
    sequences = strategies.random_sequences(1, max_tokens=9)
    plain, again = tree_llama(), enable_gradient_checkpointing(tree_llama())
    assert torch.equal(
        gradients(packed_loss(again, sequences, 70), again), gradients(packed_loss(plain, sequences, 70), plain)
    )


def test_fewer_activations_are_kept() -> None:
    sequences = strategies.random_sequences(1, num_prompts=8, group_size=4, max_tokens=30)
    kept = []
    for model in (tree_llama(num_hidden_layers=6), enable_gradient_checkpointing(tree_llama(num_hidden_layers=6))):
        with measure_peak([model], []) as meter:
            (batch,) = pack(sequences, tokens_per_microbatch=10_000)
            completion_logprobs(model, batch)[0].sum().backward()
        kept.append(meter.activations)
    assert kept[1] < 0.5 * kept[0]


def test_dropout_stays_off() -> None:
    config = GPT2Config(vocab_size=29, n_embd=24, n_layer=2, n_head=4, n_positions=64, resid_pdrop=0.9, attn_pdrop=0.9)
    model = enable_gradient_checkpointing(GPT2LMHeadModel(config).eval())
    ids = torch.tensor([[1, 2, 3, 4]])
    assert torch.equal(model(ids, use_cache=False).logits, model(ids, use_cache=False).logits)


def test_a_copy_in_evaluation_mode_may_use_a_cache() -> None:
    copied = copy.deepcopy(enable_gradient_checkpointing(tree_llama())).eval()
    cache = DynamicCache(config=copied.config)
    copied(torch.tensor([[1, 2, 3]]), use_cache=True, **cache_argument(copied, cache))
    assert cache.get_seq_length() == 3


def test_the_switch_has_the_name_that_the_library_of_each_version_gives_it(monkeypatch: pytest.MonkeyPatch) -> None:
    turned_on = []
    new = "activation_checkpointing_enable"
    monkeypatch.setattr(LlamaForCausalLM, new, lambda self, settings: turned_on.append(settings), raising=False)
    monkeypatch.delattr(PreTrainedModel, "gradient_checkpointing_enable")
    enable_gradient_checkpointing(tree_llama())
    assert turned_on[0]["use_reentrant"] is False


def test_an_architecture_that_cannot_is_refused() -> None:
    model = strategies.tiny_llama()
    model.supports_gradient_checkpointing = False
    with pytest.raises(ModelError, match="gradient_checkpointing = false"):
        enable_gradient_checkpointing(model)


def adapted(base: LlamaForCausalLM, name: str) -> AdaptedModel:
    """An adapter that changes something."""
    model = add_lora(base, LoraConfig(rank=3), name, seed=0)
    generator = torch.Generator().manual_seed(len(name))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model


BETWEEN: dict[str, Callable[[AdaptedModel, AdaptedModel, PackedBatch], object]] = {
    "nothing": lambda policy, other, batch: None,
    "another adapter": lambda policy, other, batch: completion_logprobs(other, batch),
    "the reference": lambda policy, other, batch: completion_logprobs(AdaptedModel(policy.base, ""), batch),
}


@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("twice", [False, True])
def test_what_is_computed_again_has_the_adapter_of_its_forward_pass(between: str, twice: bool) -> None:
    (batch,) = pack(strategies.random_sequences(1, max_tokens=9), tokens_per_microbatch=10_000)
    found = []
    for base in (tree_llama(), enable_gradient_checkpointing(tree_llama())):
        policy, other = adapted(base, "policy"), adapted(base, "critics")
        loss = completion_logprobs(policy, batch)[0].sum()
        BETWEEN[between](policy, other, batch)
        before = active_name(base)
        for _ in range(1 + twice):
            loss.backward(retain_graph=True)
        assert active_name(base) == before  # the next pass finds what it left
        assert all(parameter.grad is None for parameter in other.parameters())
        found.append(torch.cat([parameter.grad.flatten() for parameter in policy.parameters()]))
    assert float(found[0].norm()) > 0.1
    assert torch.equal(*found)


def test_two_adapters_may_wait_for_their_backward_passes_at_once() -> None:
    (batch,) = pack(strategies.random_sequences(1, max_tokens=9), tokens_per_microbatch=10_000)
    found = []
    for base in (tree_llama(), enable_gradient_checkpointing(tree_llama())):
        models = [adapted(base, "policy"), adapted(base, "critics")]
        sum(completion_logprobs(model, batch)[0].sum() for model in models).backward()
        found.append(torch.cat([parameter.grad.flatten() for model in models for parameter in model.parameters()]))
    assert torch.equal(*found)

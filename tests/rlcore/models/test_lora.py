"""Adapters: off they are the base, merged they compute the same, and only they learn."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from rlcore.config import LoraConfig
from rlcore.errors import ModelError
from rlcore.models.heads import ScalarHeadModel
from rlcore.models.loading import load_policy
from rlcore.models.lora import AdaptedModel, MergedState, add_lora, is_adapter_of, load_adapter, merged_state
from rlcore.models.policy import completion_logprobs, score_sequences
from rlcore.text.packing import pack
from tests import strategies

CONFIG = LoraConfig(rank=4, alpha=8)
SEQUENCES = strategies.random_sequences(0)


def logprobs(model: LlamaForCausalLM | AdaptedModel) -> torch.Tensor:
    return torch.cat(score_sequences(model, SEQUENCES, tokens_per_microbatch=100))


def loss_of(model: LlamaForCausalLM | AdaptedModel) -> torch.Tensor:
    (batch,) = pack(SEQUENCES, tokens_per_microbatch=1000)
    return completion_logprobs(model, batch)[0].sum()


def trained(base: LlamaForCausalLM, name: str = "policy") -> AdaptedModel:
    """An adapter whose B is not zero any more."""
    model = add_lora(base, CONFIG, name, seed=3)
    generator = torch.Generator().manual_seed(len(name))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def test_adapter_off_is_base() -> None:
    base = strategies.tiny_llama()
    before = logprobs(base)
    adapted = trained(base)
    assert float((logprobs(adapted) - before).abs().max()) > 0.1
    assert torch.equal(logprobs(AdaptedModel(base, "")), before)
    assert not torch.equal(logprobs(adapted), before)  # and on again


@pytest.mark.parametrize("tied", [True, False])
def test_merged_weights_compute_the_same(tied: bool) -> None:
    base = strategies.tiny_llama(tie_word_embeddings=tied)
    plain = copy.deepcopy(base)
    adapted = trained(base)
    trained(base, "another")
    state = MergedState(adapted)
    assert list(state) == list(plain.state_dict())
    assert {name: value.shape for name, value in state.items()} == {n: v.shape for n, v in plain.state_dict().items()}
    assert {name for name in state if not torch.equal(state[name], plain.state_dict()[name])} == {
        f"model.layers.{layer}.{path}.weight"
        for layer in (0, 1)
        for path in (*(f"self_attn.{x}_proj" for x in "qkvo"), *(f"mlp.{x}_proj" for x in ("gate", "up", "down")))
    }
    plain.load_state_dict(dict(state))
    torch.testing.assert_close(logprobs(plain), logprobs(adapted), rtol=0, atol=1e-5)


def test_the_merged_weights_of_a_plain_policy_are_its_own() -> None:
    policy = strategies.tiny_llama()
    state = merged_state(policy)
    assert all(state[name].data_ptr() == value.data_ptr() for name, value in policy.state_dict().items())


def test_only_active_adapter_gets_gradient() -> None:
    base = strategies.tiny_llama()
    policy, other = trained(base), trained(base, "critic")
    loss_of(policy).backward()
    assert all(parameter.grad is not None and bool(parameter.grad.any()) for parameter in policy.parameters())
    assert all(parameter.grad is None for parameter in other.parameters())
    own = {id(parameter) for parameter in policy.parameters()}
    assert {id(p) for p in base.parameters() if p.grad is not None} == own


def test_gradient_survives_pass_of_other_adapter() -> None:
    base = strategies.tiny_llama()
    policy, critic = trained(base), trained(base, "critic")
    loss_of(policy).backward()
    expected = [parameter.grad.clone() for parameter in policy.parameters()]
    policy.zero_grad(set_to_none=True)
    loss = loss_of(policy)
    logprobs(critic)
    logprobs(AdaptedModel(base, ""))
    loss.backward()
    for parameter, gradient in zip(policy.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad, gradient)


def test_frozen_adapter_stays_frozen() -> None:
    base = strategies.tiny_llama()
    judge = trained(base, "reward_model").requires_grad_(False)
    policy = trained(base)
    for model in (policy, judge, AdaptedModel(base, ""), policy):
        logprobs(model)
    assert not any(parameter.requires_grad for parameter in judge.parameters())
    assert all(parameter.requires_grad for parameter in policy.parameters())
    learning = sum(parameter.requires_grad for parameter in base.parameters())
    assert learning == len(list(policy.parameters()))


def test_scalar_model_on_adapter() -> None:
    base = strategies.tiny_llama()
    critic = ScalarHeadModel.on_backbone(trained(base, "critic"))
    names = [name for name, _ in critic.named_parameters()]
    assert sum("lora_" in name for name in names) == len(names) - 1
    assert names[-1] == "head.weight"


def test_adapter_depends_on_seed_and_name() -> None:
    def draw(seed: int, name: str) -> list[float]:
        adapted = add_lora(strategies.tiny_llama(), CONFIG, name, seed=seed)
        return next(iter(adapted.parameters())).flatten().tolist()

    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = draw(0, "policy")
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert draw(0, "policy") == first
    assert draw(1, "policy") != first
    assert draw(0, "critic") != first
    assert max(map(abs, first)) <= 24**-0.5  # uniform within 1 / sqrt(inputs)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LoraConfig(rank=2, targets=("q_proj", "nowhere")), "no linear layer nowhere"),
        (LoraConfig(), "must be at least 1"),
    ],
)
def test_impossible_adapter_is_refused(config: LoraConfig, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        add_lora(strategies.tiny_llama(), config, "policy", seed=0)


def test_adapter_on_half_precision_base_is_float32() -> None:
    adapted = trained(strategies.tiny_llama(dtype=torch.bfloat16))
    assert {parameter.dtype for parameter in adapted.parameters()} == {torch.float32}
    state = MergedState(adapted)
    assert state["model.layers.0.mlp.up_proj.weight"].dtype == torch.float32
    assert state["model.norm.weight"].dtype == torch.bfloat16
    assert bool(logprobs(adapted).isfinite().all())


@pytest.fixture
def on_disk(tmp_path: Path) -> Path:
    strategies.tiny_llama().save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def from_disk(folder: Path) -> LlamaForCausalLM:
    return load_policy(folder, device=torch.device("cpu"), dtype=torch.float32)


def test_saved_policy_is_whole_checkpoint_with_adapter(on_disk: Path, tmp_path: Path) -> None:
    adapted = trained(from_disk(on_disk))
    expected = logprobs(adapted)
    adapted.save_pretrained(tmp_path / "saved")
    torch.testing.assert_close(logprobs(from_disk(tmp_path / "saved")), expected, rtol=0, atol=1e-5)
    base = from_disk(on_disk)
    trained(base, "another")
    assert torch.equal(logprobs(load_adapter(base, tmp_path / "saved", "reward_model")), expected)


def test_saved_adapter_is_read_by_peft(on_disk: Path, tmp_path: Path) -> None:
    from peft import PeftModel

    adapted = trained(from_disk(on_disk))
    expected = logprobs(adapted)
    adapted.save_pretrained(tmp_path / "saved")
    theirs = PeftModel.from_pretrained(from_disk(on_disk), str(tmp_path / "saved" / "adapter")).get_base_model()
    torch.testing.assert_close(logprobs(theirs), expected, rtol=0, atol=1e-6)


def test_adapter_of_other_base_is_refused(on_disk: Path, tmp_path: Path) -> None:
    trained(from_disk(on_disk)).save_pretrained(tmp_path / "saved")
    strategies.tiny_llama(seed=5).save_pretrained(tmp_path / "other")
    other = from_disk(tmp_path / "other")
    assert is_adapter_of(from_disk(on_disk), tmp_path / "saved")
    assert not is_adapter_of(other, tmp_path / "saved")
    assert not is_adapter_of(other, on_disk)
    with pytest.raises(ModelError, match="adapter of this base not found"):
        load_adapter(other, tmp_path / "saved", "critic")


def test_adapter_shapes() -> None:
    base = strategies.tiny_llama()
    weights = copy.deepcopy(base).state_dict()
    model = trained(base)
    shapes = model.adapter_shapes()
    assert set(shapes) == {name for name in weights if name.endswith("_proj.weight")}
    assert shapes == {name: tuple(weights[name].shape) for name in shapes}


def test_save_adapter_writes_peft_format(tmp_path: Path) -> None:
    model = trained(strategies.tiny_llama())
    model.save_adapter(tmp_path / "adapter")
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert len(stored) == 2 * len(model.adapter_shapes())
    name = "model.layers.0.self_attn.q_proj"
    assert torch.equal(
        stored[f"base_model.model.{name}.lora_B.weight"],
        model.base.get_submodule(name).lora_B["policy"].weight,
    )
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["r"] == CONFIG.rank

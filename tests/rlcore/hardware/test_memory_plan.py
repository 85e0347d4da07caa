"""The memory plan: exact where numbers are counted, within a quarter of a measurement where they are estimated."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from rlcore.algorithms.table import ALGORITHMS
from rlcore.config import (
    BackboneConfig,
    CriticConfig,
    DpoConfig,
    EngineConfig,
    KlConfig,
    LoraConfig,
    OptimConfig,
    RewardModelConfig,
    SamplingConfig,
    SftConfig,
    UpdateConfig,
)
from rlcore.hardware.memory_meter import measure_peak, num_parameters, optimizer_bytes
from rlcore.hardware.memory_plan import (
    Conditions,
    ModelSize,
    dpo_footprint,
    format_bytes,
    reward_model_footprint,
    rl_footprint,
    sft_footprint,
)
from rlcore.hardware.precision import set_compute_dtype
from rlcore.models.gradient_checkpointing import enable_gradient_checkpointing
from rlcore.models.heads import ScalarHeadModel
from rlcore.models.lora import add_lora
from rlcore.models.policy import completion_loss, completion_states
from rlcore.models.preview import model_size
from rlcore.models.tree_attention import TREE_ATTENTION
from rlcore.text.packing import TokenSequence, pack
from rlcore.training.learner import Learner
from tests import strategies

SHAPES: dict[str, Any] = {
    "tiny": LlamaConfig(
        vocab_size=262,
        hidden_size=192,
        intermediate_size=640,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=6,
        tie_word_embeddings=True,
    ),
    "wide, few keys": Qwen2Config(
        vocab_size=1000,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    ),
}


def made(name: str, *, gradient_checkpointing: bool = False, dtype: torch.dtype = torch.float32) -> Any:
    """A model of a shape, ready to learn."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(SHAPES[name], attn_implementation=TREE_ATTENTION)
    set_compute_dtype(model, dtype)
    return enable_gradient_checkpointing(model).train() if gradient_checkpointing else model


def measured_activations(model: Any, tokens: int) -> int:
    """Measure the bytes that autograd keeps for a micro-batch, without the head's buffers."""
    length = tokens // 8
    sequences = [
        TokenSequence(prompt_ids=(3,) * (length // 2), completion_ids=tuple(range(5 + i, 5 + i + length - length // 2)))
        for i in range(8)
    ]
    (batch,) = pack(
        [
            TokenSequence(prompt_ids=(i, *s.prompt_ids[1:]), completion_ids=s.completion_ids)
            for i, s in enumerate(sequences)
        ],
        tokens_per_microbatch=tokens,
    )
    with measure_peak([model], []) as meter:
        loss = completion_loss(model, completion_states(model, batch), batch, lambda _, p, __: -p.sum(), by_token=True)
        loss.backward()
    return meter.activations


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_activations_are_within_a_quarter_of_what_autograd_keeps(
    name: str, dtype: torch.dtype, gradient_checkpointing: bool
) -> None:
    size, tokens = model_size(SHAPES[name]), 512
    conditions = Conditions(compute_bytes=dtype.itemsize, gradient_checkpointing=gradient_checkpointing, tokens=tokens)
    head = conditions.activations(size) - conditions.backbone(size)
    found = measured_activations(made(name, gradient_checkpointing=gradient_checkpointing, dtype=dtype), tokens)
    if gradient_checkpointing:  # the meter does not see the one layer that is there again in the backward pass
        assert found < conditions.activations(size) < 6 * found + head
        return
    assert conditions.backbone(size) == pytest.approx(found, rel=0.25)


@pytest.mark.parametrize("name", SHAPES)
def test_the_size_of_a_model_is_read_from_its_configuration(name: str) -> None:
    size, model = model_size(SHAPES[name]), made(name)
    assert size.num_parameters == num_parameters(model)
    adapter = LoraConfig(rank=3, targets=("q_proj", "down_proj"))
    adapted = add_lora(model, adapter, "policy", seed=0)
    assert size.adapter_parameters(adapter) == sum(parameter.numel() for parameter in adapted.parameters())
    assert size.adapter_parameters(LoraConfig()) == 0


def test_packed_copies_are_those_of_large_linear_layers_and_of_the_head() -> None:
    size = dataclasses.replace(SIZE, hidden=256, vocabulary=1000, linear=(("q", 256, 256), ("small", 4, 6)))
    assert size.packed_bytes(4) == 4 * (256 * 256 + 1000 * 256)
    assert SIZE.packed_bytes(4) == 0


def rl(name: str = "grpo", **settings: Any) -> Any:
    """A run of 2 prompts x 4 completions by the native engine."""
    return strategies.rl_config(name, **({"prompts_per_iteration": 2, "group_size": 4} | settings))


SIZE = ModelSize(
    num_parameters=100,
    num_layers=2,
    hidden=4,
    keys=2,
    feed_forward=8,
    vocabulary=5,
    linear=(("q", 4, 6),),
    adaptable=frozenset(("q",)),
)
CASES: list[tuple[Any, dict[str, Any], int]] = [
    # weights in bytes: learning at 4, frozen at 2; the engine has a copy, with a LoRA at 4
    (rl(kl=KlConfig()), {}, 400 + 200),
    (rl(kl=KlConfig(coefficient=0.1)), {}, 400 + 200 + 200),
    (rl(kl=KlConfig(), update=UpdateConfig(lora=LoraConfig(rank=2))), {}, 80 + 200 + 400),
    (rl("ppo", kl=KlConfig()), {"uses_critic": True}, 800 + 200),
    (rl("ppo", kl=KlConfig(), critic=CriticConfig(architecture="shared")), {"uses_critic": True}, 400 + 200),
    (rl(sampling=SamplingConfig(max_new_tokens=8, engine=EngineConfig(kind="vllm"))), {}, 400),
]


@pytest.mark.parametrize(("config", "settings", "weights"), CASES)
def test_weights_of_a_run_are_counted_exactly(config: Any, settings: dict[str, Any], weights: int) -> None:
    given = {
        "uses_critic": False,
        "reward_model": None,
        "compute_bytes": 2,
        "gradient_checkpointing": False,
        "num_tokens": 10,
    }
    found = rl_footprint(SIZE, config, **(given | settings))
    assert found.weights == weights
    assert found.optimizer == 2 * found.gradients
    of_number = 0 if config.sampling.engine else 4 if config.update.lora.rank else 2
    assert found.kv_cache == 2 * 2 * 2 * of_number * 8 * 10


def test_moments_in_eight_bits_are_a_quarter() -> None:
    config = SftConfig(num_steps=1, batch_size=1, learning_rate=1.0, optim=OptimConfig(kind="adamw_8bit"))
    found = sft_footprint(SIZE, config, compute_bytes=4, gradient_checkpointing=False)
    assert (found.weights, found.gradients, found.optimizer) == (400, 400, 200)


def test_dpo_holds_no_second_model_and_an_adapter_learns_on_frozen_weights() -> None:
    def found(compute_bytes: int = 2, **settings: Any) -> Any:
        config = DpoConfig(num_epochs=1, batch_size=1, learning_rate=1.0, **settings)
        return dpo_footprint(SIZE, config, compute_bytes=compute_bytes, gradient_checkpointing=False)

    whole, adapted = found(), found(lora=LoraConfig(rank=2))
    assert (whole.weights, whole.gradients, whole.optimizer) == (400, 400, 800)
    assert (adapted.weights, adapted.gradients, adapted.optimizer) == (200 + 80, 80, 160)
    assert found(4, lora=LoraConfig(rank=2)).activations < found(4).activations
    assert adapted.activations > whole.activations  # in half precision its layers' outputs are float32


def reward(**settings: Any) -> RewardModelConfig:
    return RewardModelConfig(num_epochs=1, batch_size=1, learning_rate=1.0, head_learning_rate=1.0, **settings)


def test_a_frozen_backbone_of_a_reward_model_is_held_once_and_has_no_gradients() -> None:
    heads = reward_model_footprint(
        SIZE,
        reward(ensemble=3, backbone=BackboneConfig(trainable_layers=0)),
        compute_bytes=4,
        gradient_checkpointing=False,
    )
    assert (heads.weights, heads.gradients, heads.activations) == (4 * (24 + 20), 0, 0)
    whole = reward_model_footprint(SIZE, reward(ensemble=3), compute_bytes=4, gradient_checkpointing=False)
    assert (whole.weights, whole.gradients) == (3 * 4 * (24 + 20), 4 * (24 + 20))
    adapted = reward_model_footprint(
        SIZE, reward(backbone=BackboneConfig(lora=LoraConfig(rank=2))), compute_bytes=2, gradient_checkpointing=False
    )
    assert (adapted.weights, adapted.gradients) == (200 + 80, 80)


def test_the_plan_of_a_run_is_what_a_learner_then_holds() -> None:
    config = rl("ppo", kl=KlConfig())
    policy, critic = strategies.tiny_llama(), strategies.tiny_llama(seed=1)
    learner = Learner(policy, ScalarHeadModel.on_backbone(critic), algorithm=ALGORITHMS["ppo"], config=config)
    size = model_size(policy.config)
    plan = rl_footprint(
        size, config, uses_critic=True, reward_model=None, compute_bytes=4, gradient_checkpointing=False, num_tokens=16
    )
    with measure_peak([learner.policy, learner.critic], learner.optimizers) as meter:
        learner.update(strategies.random_samples(0, dtype=torch.float32), seed=0)
    engine = 4 * size.num_parameters
    assert plan.weights == pytest.approx(meter.weights + engine, rel=0.02)  # heads, and the critic's unused LM head
    assert plan.gradients == pytest.approx(meter.gradients, rel=0.02)
    assert plan.optimizer == pytest.approx(optimizer_bytes(learner.optimizers), rel=0.02)


def test_bytes_are_told_for_people() -> None:
    sizes = [131.4 * 2**30, 1.25 * 2**30, 184.2 * 2**20]
    assert [format_bytes(int(size)) for size in sizes] == ["131 GiB", "1.2 GiB", "184 MiB"]

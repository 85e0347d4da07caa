"""Memory by part: worked numbers, what is shared counted once, and a measurement that agrees with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlcore.algorithms.table import ALGORITHMS
from rlcore.config import CriticConfig, LoraConfig, UpdateConfig
from rlcore.hardware.memory import Footprint, MemoryPlan, expected
from rlcore.hardware.memory_meter import kv_cache_bytes, measure_peak, num_parameters, optimizer_bytes, weight_bytes
from rlcore.models.heads import ScalarHeadModel
from rlcore.models.lora import AdaptedModel, add_lora
from rlcore.training.learner import Learner
from tests import strategies
from tests.learners import weights_of

SAMPLES = strategies.random_samples(0, dtype=torch.float32)


@pytest.mark.parametrize(
    ("plan", "multiple"),
    [
        # Learning: 4 each (weights, gradients, two moments). Frozen: 1 each, and 1 for the engine's copy.
        ({"recipe": "ppo"}, 4 + 4 + 1 + 1 + 1),  # policy, critic, reference, reward model, engine
        ({"recipe": "ppo", "critic_architecture": "shared"}, 4 + 1 + 1 + 1),
        ({"recipe": "rlvr_ppo"}, 4 + 4 + 1 + 1),
        ({"recipe": "grpo"}, 4 + 1 + 1 + 1),
        ({"recipe": "rlvr_grpo"}, 4 + 1 + 1),
        ({"recipe": "rlvr_grpo", "reference": False}, 4 + 1),
        # Adapters of 1 % on a frozen base, which is the reference as well: base and engine.
        ({"recipe": "rlvr_grpo", "num_adapter": 1}, 1 + 1 + 4 * 0.01),
        ({"recipe": "ppo", "num_adapter": 1, "critic_architecture": "lora"}, 1 + 1 + 1 + 2 * 4 * 0.01),
        # A teacher is a model of its own beside the base; where all weights learn it stands in place of the start.
        ({"recipe": "rlvr_grpo", "num_adapter": 1, "own_reference": True}, 1 + 1 + 1 + 4 * 0.01),
        ({"recipe": "rlvr_grpo", "own_reference": True}, 4 + 1 + 1),
        (
            {"recipe": "ppo", "num_adapter": 1, "critic_architecture": "lora", "reward_model_is_adapter": True},
            1 + 1 + 2 * 4 * 0.01 + 0.01,
        ),
    ],
)
def test_a_plan_in_multiples_of_the_policys_parameters(plan: dict[str, Any], multiple: float) -> None:
    footprint = expected(MemoryPlan(num_parameters=100, **plan))
    assert footprint.metrics(100)["memory/total_multiple"] == pytest.approx(multiple)
    assert footprint.metrics(100)["memory/total_multiple_bf16"] == pytest.approx(2 * multiple)


def test_a_base_in_half_precision_weighs_half_but_not_in_the_engine() -> None:
    plan = MemoryPlan(recipe="ppo", num_parameters=100, num_adapter=1, critic_architecture="lora", frozen_bytes=2)
    # Base and reward model at 2 bytes, the engine at 4, two adapters of one parameter at 16.
    assert expected(plan).total == 2 * 200 + 400 + 2 * 16


def test_keys_and_values_of_a_worked_shape() -> None:
    # 2 (keys, values) * 2 layers * 2 key-value heads * width 24 / 4 = 6: 48 numbers a token; 3 sequences of 5.
    config = strategies.tiny_llama().config
    assert kv_cache_bytes(config, num_sequences=3, num_tokens=5, bytes_per_number=4) == 48 * 3 * 5 * 4


def test_the_total_is_the_sum_of_the_parts() -> None:
    assert Footprint(weights=1, gradients=2, optimizer=3, activations=4, kv_cache=5).total == 15


def learner_of(placement: str, rank: int) -> Learner:
    """A GRPO learner, or PPO's with the critic somewhere."""
    policy: Any = strategies.tiny_llama()
    adapter = LoraConfig(rank=rank)
    if rank:
        policy = add_lora(policy, adapter, "policy", seed=0)
    critic = None
    if placement:
        backbones = {"separate": strategies.tiny_llama, "shared": lambda: policy}
        backbones["lora"] = lambda: add_lora(policy, adapter, "critic", seed=0)
        critic = ScalarHeadModel.on_backbone(backbones[placement]())
    name = "ppo" if placement else "grpo"
    settings = {"critic": CriticConfig(architecture=placement)} if placement else {}
    config = strategies.rl_config(name, update=UpdateConfig(lora=adapter), **settings)
    return Learner(policy, critic, algorithm=ALGORITHMS[name], config=config)


@pytest.mark.parametrize(("placement", "rank"), [("", 0), ("", 2), ("separate", 0), ("shared", 0), ("lora", 2)])
def test_a_measured_update_holds_what_the_plan_says(placement: str, rank: int) -> None:
    learner = learner_of(placement, rank)
    with measure_peak([learner.policy, learner.critic], learner.optimizers) as meter:
        learner.update(SAMPLES, seed=0)
    size = num_parameters(learner.policy)
    plan = MemoryPlan(
        recipe="rlvr_ppo" if placement else "rlvr_grpo",
        num_parameters=size,
        num_adapter=sum(p.numel() for p in learner.policy.parameters()) if rank else 0,
        critic_architecture=placement or "separate",
        reference=False,
    )
    wanted = expected(plan)
    heads = 24 * 4 if placement else 0
    buffers = weight_bytes([learner.policy, learner.critic]) - (wanted.weights - 4 * size) - heads
    assert 0 <= buffers < 1000  # the inverse frequencies of the rotary positions
    assert meter.weights == weight_bytes([learner.policy, learner.critic])
    # A gradient that is zero, as that of a backbone below a zero head, is there all the same.
    assert meter.gradients == wanted.gradients + heads
    steps = 4 * sum(len(group["params"]) for optimizer in learner.optimizers for group in optimizer.param_groups)
    assert optimizer_bytes(learner.optimizers) == wanted.optimizer + 2 * heads + steps
    assert meter.activations > 0


def test_measuring_changes_nothing_that_is_computed() -> None:
    plain, measured = learner_of("shared", 0), learner_of("shared", 0)
    plain.update(SAMPLES, seed=0)
    with measure_peak([measured.policy], measured.optimizers):
        measured.update(SAMPLES, seed=0)
    assert torch.equal(weights_of(plain.policy), weights_of(measured.policy))


def test_activations_grow_with_the_micro_batch_and_end_with_the_update() -> None:
    peaks = []
    for samples in (SAMPLES[:3], SAMPLES):
        learner = learner_of("", 0)
        with measure_peak([learner.policy], learner.optimizers) as meter:
            learner.update(samples, seed=0)
        peaks.append(meter.activations)
        assert not meter._held
    assert peaks[1] > 1.5 * peaks[0]


def test_what_autograd_keeps_is_counted_once_and_a_weight_never() -> None:
    # exp keeps its result (4 bytes * 8); the product keeps x twice over (32 bytes once); the weight is no activation.
    layer = torch.nn.Linear(8, 8, bias=False)
    x = torch.ones(8, requires_grad=True)
    with measure_peak([layer], []) as meter:
        y = x * x
        kept = meter.activations
        z = y.exp()
        assert (kept, meter.activations) == (32, 64)
        layer(z)
        assert meter.activations == 64  # z is there already
    del y, z


def test_a_shared_base_is_counted_once() -> None:
    base = strategies.tiny_llama()
    before = weight_bytes([base])
    policy, critic = (add_lora(base, LoraConfig(rank=2), name, seed=0) for name in ("policy", "critic"))
    judge = ScalarHeadModel.on_backbone(critic)
    added = sum(p.numel() * 4 for model in (policy, judge) for p in model.parameters())
    assert weight_bytes([policy, judge, AdaptedModel(base, ""), None]) == before + added
    assert num_parameters(policy) == num_parameters(strategies.tiny_llama())

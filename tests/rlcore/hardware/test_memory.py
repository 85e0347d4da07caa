"""Memory: free, measured and planned."""

from __future__ import annotations

import dataclasses
import platform
import resource
from pathlib import Path
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
from rlcore.hardware import memory
from rlcore.hardware.memory import free_bytes, release_freed, total_bytes
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
from rlcore.models.heads import ScalarHeadModel
from rlcore.models.lora import AdaptedModel, add_lora
from rlcore.models.memory_meter import kv_cache_bytes, measure_peak, num_parameters, optimizer_bytes, weight_bytes
from rlcore.models.policy import completion_loss, completion_states
from rlcore.models.preview import model_size
from rlcore.models.runtime import enable_gradient_checkpointing
from rlcore.models.tree_attention import TREE_ATTENTION
from rlcore.text.packing import TokenSequence, pack
from rlcore.training.learner import Learner
from tests import strategies
from tests.learners import weights_of

CPU = torch.device("cpu")


@pytest.fixture
def small_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine with 4 KiB available, and a folder for its container's limits."""
    (tmp_path / "meminfo").write_text("MemTotal:  9 kB\nMemAvailable:       4 kB\n", encoding="ascii")
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    return tmp_path


def limit(folder: Path, maximum: str, current: int, inactive_file: int = 0) -> None:
    (folder / "memory.max").write_text(f"{maximum}\n", encoding="ascii")
    (folder / "memory.current").write_text(f"{current}\n", encoding="ascii")
    (folder / "memory.stat").write_text(f"anon 7\ninactive_file {inactive_file}\n", encoding="ascii")


def test_free_bytes_without_container(small_machine: Path) -> None:
    assert free_bytes(CPU) == total_bytes(CPU) == 4096


@pytest.mark.parametrize(
    ("maximum", "current", "cached", "free"),
    [("3000", 2000, 0, 1000), ("3000", 2000, 500, 1500), ("max", 2000, 0, 4096), ("9000", 100, 0, 4096)],
)
def test_container_limits_free_bytes(small_machine: Path, maximum: str, current: int, cached: int, free: int) -> None:
    limit(small_machine, maximum, current, cached)
    assert free_bytes(CPU) == free


def test_free_bytes_may_be_unknown(small_machine: Path) -> None:
    (small_machine / "meminfo").unlink()
    assert free_bytes(CPU) is None


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * resource.getpagesize()


@pytest.mark.skipif("glibc" not in platform.libc_ver(), reason="only glibc keeps freed memory of this size")
def test_freed_memory_is_returned_to_the_system() -> None:
    tensors = [torch.ones(4096) for _ in range(8000)]  # below the size that glibc returns by itself
    kept = tensors[::100]
    del tensors
    before = resident_bytes()
    release_freed()
    assert resident_bytes() < before - 8000 * 4096 * 4 // 2
    assert all(bool((each == 1.0).all()) for each in kept)


SAMPLES = strategies.random_samples(0, dtype=torch.float32)


def test_kv_cache_by_hand() -> None:
    # 2 (keys, values) * 2 layers * 2 key-value heads * width 24 / 4 = 6: 48 numbers a token; 3 sequences of 5.
    config = strategies.tiny_llama().config
    assert kv_cache_bytes(config, num_sequences=3, num_tokens=5, bytes_per_number=4) == 48 * 3 * 5 * 4


def learner_of(placement: str, rank: int) -> Learner:
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
    config = strategies.rl_config(name, update=UpdateConfig(lora=adapter), kl=KlConfig(), **settings)
    return Learner(policy, critic, algorithm=ALGORITHMS[name], config=config)


@pytest.mark.parametrize(("placement", "rank"), [("", 0), ("", 2), ("separate", 0), ("shared", 0), ("lora", 2)])
def test_measured_update_equals_plan(placement: str, rank: int) -> None:
    learner = learner_of(placement, rank)
    with measure_peak([learner.policy, learner.critic], learner.optimizers) as meter:
        learner.update(SAMPLES, seed=0)
    size = num_parameters(learner.policy)
    given = {"reward_model": None, "compute_bytes": 4, "gradient_checkpointing": False, "num_tokens": 1}
    shape = model_size(strategies.tiny_llama().config)
    wanted = rl_footprint(shape, learner.config, uses_critic=bool(placement), **given)
    heads = 24 * 4 if placement else 0
    buffers = weight_bytes([learner.policy, learner.critic]) - (wanted.weights - 4 * size) - heads
    assert 0 <= buffers < 1000  # the inverse frequencies of the rotary positions
    assert meter.weights == weight_bytes([learner.policy, learner.critic])
    # A gradient that is zero, as that of a backbone below a zero head, is there all the same.
    assert meter.gradients == wanted.gradients + heads
    steps = 4 * sum(len(group["params"]) for optimizer in learner.optimizers for group in optimizer.param_groups)
    assert optimizer_bytes(learner.optimizers) == wanted.optimizer + 2 * heads + steps
    assert meter.activations > 0


def test_measuring_changes_no_weight() -> None:
    plain, measured = learner_of("shared", 0), learner_of("shared", 0)
    plain.update(SAMPLES, seed=0)
    with measure_peak([measured.policy], measured.optimizers):
        measured.update(SAMPLES, seed=0)
    assert torch.equal(weights_of(plain.policy), weights_of(measured.policy))


def test_activations_grow_with_micro_batch() -> None:
    peaks = []
    for samples in (SAMPLES[:3], SAMPLES):
        learner = learner_of("", 0)
        with measure_peak([learner.policy], learner.optimizers) as meter:
            learner.update(samples, seed=0)
        peaks.append(meter.activations)
    assert peaks[1] > 1.5 * peaks[0]


def test_saved_tensors_are_counted_once() -> None:
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
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    ),
}


def made(name: str, *, gradient_checkpointing: bool = False, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(SHAPES[name], attn_implementation=TREE_ATTENTION)
    set_compute_dtype(model, dtype)
    return enable_gradient_checkpointing(model).train() if gradient_checkpointing else model


def measured_activations(model: Any, tokens: int) -> int:
    """Measure the bytes that autograd keeps for a micro-batch, without the head's buffers."""
    half = tokens // 16
    sequences = [
        TokenSequence(prompt_ids=(i, *(3,) * (half - 1)), completion_ids=tuple(range(5 + i, 5 + i + half)))
        for i in range(8)
    ]
    (batch,) = pack(sequences, tokens_per_microbatch=tokens)
    with measure_peak([model], []) as meter:
        loss = completion_loss(model, completion_states(model, batch), batch, lambda _, p, __: -p.sum(), by_token=True)
        loss.backward()
    return meter.activations


@pytest.mark.parametrize(
    ("name", "dtype", "gradient_checkpointing"),
    [
        ("tiny", torch.float32, False),
        ("wide, few keys", torch.float32, False),
        ("wide, few keys", torch.bfloat16, False),
        ("wide, few keys", torch.float32, True),
        ("tiny", torch.bfloat16, True),
    ],
)
def test_planned_activations_are_within_a_quarter(name: str, dtype: torch.dtype, gradient_checkpointing: bool) -> None:
    size, tokens = model_size(SHAPES[name]), 256
    conditions = Conditions(compute_bytes=dtype.itemsize, gradient_checkpointing=gradient_checkpointing, tokens=tokens)
    head = conditions.activations(size) - conditions.backbone(size)
    found = measured_activations(made(name, gradient_checkpointing=gradient_checkpointing, dtype=dtype), tokens)
    if gradient_checkpointing:  # the meter does not see the one layer that is there again in the backward pass
        assert found < conditions.activations(size) < 6 * found + head
        return
    assert conditions.backbone(size) == pytest.approx(found, rel=0.25)


@pytest.mark.parametrize("name", SHAPES)
def test_model_size_from_configuration(name: str) -> None:
    size, model = model_size(SHAPES[name]), made(name)
    assert size.num_parameters == num_parameters(model)
    adapter = LoraConfig(rank=3, targets=("q_proj", "down_proj"))
    adapted = add_lora(model, adapter, "policy", seed=0)
    assert size.adapter_parameters(adapter) == sum(parameter.numel() for parameter in adapted.parameters())
    assert size.adapter_parameters(LoraConfig()) == 0


def test_packed_copies_of_large_layers() -> None:
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
KL, LORA = KlConfig(coefficient=0.1), UpdateConfig(lora=LoraConfig(rank=2))
LORA_CRITIC = CriticConfig(architecture="lora")


def reward(**settings: Any) -> RewardModelConfig:
    return RewardModelConfig(num_epochs=1, batch_size=1, learning_rate=1.0, head_learning_rate=1.0, **settings)


ON_BASE = reward(backbone=BackboneConfig(lora=LoraConfig(rank=2)))
CASES: list[tuple[Any, dict[str, Any], int]] = [
    # weights in bytes: learning at 4, frozen at 2; the engine has a copy, with a LoRA at 4
    (rl(kl=KlConfig()), {}, 400 + 200),
    (rl(kl=KL), {}, 400 + 200 + 200),
    (rl(kl=KL), {"own_reference": True}, 400 + 200 + 200),  # in place of the start
    (rl(kl=KL), {"reward_model": reward()}, 400 + 200 + 200 + 200),
    (rl(kl=KlConfig(), update=LORA), {}, 80 + 200 + 400),
    (rl(kl=KL, update=LORA), {}, 80 + 200 + 400),  # the base is the reference
    (rl(kl=KL, update=LORA), {"own_reference": True}, 80 + 200 + 200 + 400),
    (rl("ppo", kl=KlConfig()), {"uses_critic": True}, 800 + 200),
    (rl("ppo", kl=KL), {"uses_critic": True, "reward_model": reward()}, 800 + 200 + 200 + 200),
    (rl("ppo", kl=KlConfig(), critic=CriticConfig(architecture="shared")), {"uses_critic": True}, 400 + 200),
    (
        rl("ppo", kl=KL, update=LORA, critic=LORA_CRITIC),
        {"uses_critic": True, "reward_model": reward()},
        2 * 80 + 200 + 200 + 400,
    ),
    (
        rl("ppo", kl=KL, update=LORA, critic=LORA_CRITIC),
        {"uses_critic": True, "reward_model": ON_BASE},
        3 * 80 + 200 + 400,
    ),
    (rl(sampling=SamplingConfig(max_new_tokens=8, engine=EngineConfig(kind="vllm"))), {}, 400),
]


@pytest.mark.parametrize(("config", "settings", "weights"), CASES)
def test_weights_of_run_by_hand(config: Any, settings: dict[str, Any], weights: int) -> None:
    given = {"uses_critic": False, "reward_model": None, "compute_bytes": 2, "gradient_checkpointing": False}
    found = rl_footprint(SIZE, config, **(given | {"num_tokens": 10} | settings))
    assert found.weights == weights
    assert found.optimizer == 2 * found.gradients
    of_number = 0 if config.sampling.engine else 4 if config.update.lora.rank else 2
    assert found.kv_cache == 2 * 2 * 2 * of_number * 8 * 10
    multiples = [found.metrics(100)[f"memory/total_multiple{name}"] for name in ("", "_bf16")]
    assert multiples == [found.total / 400, found.total / 200]


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
    adapted = reward_model_footprint(SIZE, ON_BASE, compute_bytes=2, gradient_checkpointing=False)
    assert (adapted.weights, adapted.gradients) == (200 + 80, 80)


def test_format_bytes() -> None:
    sizes = [131.4 * 2**30, 1.25 * 2**30, 184.2 * 2**20]
    assert [format_bytes(int(size)) for size in sizes] == ["131 GiB", "1.2 GiB", "184 MiB"]

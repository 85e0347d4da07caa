"""Memory of a real GPU: given back between stages, enough where it is small, and as the plan says."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from transformers import LlamaConfig

from rlcore.algorithms.table import ALGORITHMS
from rlcore.config import EngineConfig, SamplingConfig, UpdateConfig
from rlcore.hardware.memory_plan import rl_footprint
from rlcore.hardware.out_of_memory import empty_cache
from rlcore.models.policy import score_sequences
from rlcore.models.preview import model_size
from rlcore.training.learner import Learner
from tests.gpu import micro
from tests.small_memory import room_for

MIB = 2**20
WIDE = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4, "num_attention_heads": 8}
SEQUENCES = micro.sequences(8, 4, longest=400)


def make_learner(device: torch.device, tokens: int, dtype: torch.dtype = torch.float32) -> Learner:
    shape = WIDE if device.type == "cuda" else {}
    policy = micro.placed(micro.make(LlamaConfig, **shape), device, dtype)
    config = micro.rl_config(
        update=UpdateConfig(tokens_per_microbatch=tokens),
        sampling=SamplingConfig(max_new_tokens=8, engine=EngineConfig(kind="vllm")),
    )
    return Learner(policy, None, algorithm=ALGORITHMS["grpo"], config=config)


@pytest.fixture
def small_card(card: torch.device) -> Iterator[torch.device]:
    empty_cache()
    yield card
    torch.cuda.set_per_process_memory_fraction(1.0, card)
    empty_cache()


def test_on_a_small_card_the_update_is_that_with_small_micro_batches(small_card: torch.device) -> None:
    squeezed = make_learner(small_card, 16384)
    squeezed.update(micro.samples(SEQUENCES), seed=0)  # the moments are there, the kernels are compiled
    before = micro.weights_of(squeezed.policy)
    empty_cache()
    total = torch.cuda.get_device_properties(small_card).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 250 * MIB) / total, small_card)
    squeezed.update(micro.samples(SEQUENCES, seed=1), seed=1)
    assert squeezed.tokens_per_microbatch < 16384
    torch.cuda.set_per_process_memory_fraction(1.0, small_card)
    expected = make_learner(small_card, 16384)
    expected.update(micro.samples(SEQUENCES), seed=0)
    expected.tokens_per_microbatch = squeezed.tokens_per_microbatch
    expected.update(micro.samples(SEQUENCES, seed=1), seed=1)
    ours, theirs = micro.weights_of(squeezed.policy), micro.weights_of(expected.policy)
    assert float((ours - theirs).norm()) < 0.05 * float((ours - before).norm())


def test_an_injected_fault_is_survived_on_any_device(device: torch.device) -> None:
    squeezed = make_learner(device, 16384)
    with room_for(squeezed.policy, 1024, fails="backward") as tried:
        squeezed.update(micro.samples(SEQUENCES), seed=0)
    assert max(tried) > 1024 >= squeezed.tokens_per_microbatch
    expected = make_learner(device, squeezed.tokens_per_microbatch)
    start = micro.weights_of(expected.policy)
    expected.update(micro.samples(SEQUENCES), seed=0)
    ours, theirs = micro.weights_of(squeezed.policy), micro.weights_of(expected.policy)
    assert float((ours - theirs).norm()) < (0.02 if device.type == "cuda" else 1e-9) * float((ours - start).norm())


def test_a_stage_that_has_ended_leaves_nothing_on_the_card(card: torch.device) -> None:
    def stage() -> None:
        learner = make_learner(card, 4096, torch.bfloat16)
        learner.update(micro.samples(SEQUENCES), seed=0)
        score_sequences(learner.policy, SEQUENCES, tokens_per_microbatch=4096)

    stage()  # kernels keep workspaces of their own
    empty_cache()
    before = torch.cuda.memory_allocated(card)
    stage()
    gc.collect()
    empty_cache()
    assert torch.cuda.memory_allocated(card) <= before + MIB
    assert torch.cuda.memory_reserved(card) <= torch.cuda.memory_allocated(card) + 64 * MIB


def test_the_plan_is_what_the_card_then_holds(card: torch.device, dtype: torch.dtype) -> None:
    make_learner(card, 4096, dtype).update(micro.samples(SEQUENCES), seed=0)  # compiled
    empty_cache()
    before = torch.cuda.memory_allocated(card)
    torch.cuda.reset_peak_memory_stats(card)
    learner = make_learner(card, 4096, dtype)
    learner.update(micro.samples(SEQUENCES), seed=0)
    found = torch.cuda.max_memory_allocated(card) - before
    plan = rl_footprint(
        model_size(learner.policy.config),
        learner.config,
        uses_critic=False,
        reward_model=None,
        compute_bytes=dtype.itemsize,
        gradient_checkpointing=False,
        num_tokens=512,
    )
    held = plan.weights + plan.gradients + plan.optimizer
    assert held <= found * 1.02  # a lower bound: what is refused cannot fit
    assert 0.5 * found < plan.total < 2.0 * found

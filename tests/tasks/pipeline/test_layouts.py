"""The arithmetic of layouts, by hand and by its laws; what a run that does not fit is told."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rlcore.config import EngineConfig, KlConfig, LoraConfig, RlConfig, SamplingConfig, UpdateConfig
from rlcore.errors import ConfigError
from rlcore.hardware.memory_plan import ModelSize
from rlcore.tasks.pipeline import layouts
from rlcore.tasks.pipeline.layouts import (
    GPUS,
    Gpu,
    IterationShape,
    best_layout,
    layout_line,
    rank_bytes,
    rollout_seconds,
)
from tests import strategies

PLAIN = Gpu(memory=100e9, flops=1e14, bandwidth=1e12, link=1e11, host=2e10, network=1e10)
SIZE = ModelSize(
    num_parameters=10**9,
    num_layers=10,
    hidden=1000,
    keys=100,
    feed_forward=4000,
    vocabulary=10_000,
    linear=(("q", 1000, 90_000),) * 10,
    adaptable=frozenset("q"),
)


def work(size: ModelSize = SIZE, **settings: Any) -> IterationShape:
    given = {
        "prompts_per_iteration": 10,
        "group_size": 10,
        "sampling": SamplingConfig(max_new_tokens=1000, engine=EngineConfig(kind="vllm")),
    }
    rl: RlConfig = strategies.rl_config(**(given | settings))
    return IterationShape(size=size, rl=rl, prompt_tokens=100, recompute=True)


def test_an_update_by_hand() -> None:
    # 10 prompts of 100 tokens and 100 completions of 400: 41,000 tokens. 8 P FLOP each at 0.4 of the card's speed:
    # 8e9 * 41e3 / 0.4e14 = 8.2 s; with a reference 2 P more at half: 2e9 * 41e3 / 0.5e14 = 1.64 s.
    assert layouts.update_seconds(work(), PLAIN, 1) == pytest.approx(8.2)
    assert layouts.update_seconds(work(kl=KlConfig(coefficient=0.1)), PLAIN, 1) == pytest.approx(9.84)
    assert layouts.update_seconds(work(), PLAIN, 4) == pytest.approx(2.05)


def test_an_update_takes_as_long_as_the_traffic_of_its_shards_where_that_is_longer() -> None:
    # 16 ranks, micro-batches of 512 tokens: 41,000 / 16 / 512 = 5.005, so 6, each 3 times 4 bytes of 1e9 parameters,
    # between machines at 0.7 of 8 cards of 1e10 bytes/s: 6 * 12e9 / 5.6e10 = 1.286 s; the products take 8.2 / 16.
    small = work(update=UpdateConfig(tokens_per_microbatch=512))
    assert layouts.update_seconds(small, PLAIN, 16) == pytest.approx(72 / 56)
    adapted = work(update=UpdateConfig(tokens_per_microbatch=512, lora=LoraConfig(rank=8)))
    assert layouts.update_seconds(adapted, PLAIN, 16) == pytest.approx(8.2 / 16)  # the base is whole on every rank


def test_shards_beside_the_card_cross_to_it_for_each_micro_batch_and_processors_take_the_step() -> None:
    # 41,000 / 512 = 80.08, so 81 micro-batches, each 3 times 4 bytes of 1e9 parameters at 0.7 of 2e10 bytes/s, and one
    # step that reads and writes 28 bytes a parameter at 2e11: 81 * 12e9 / 1.4e10 + 0.14 = 69.57 s on one card. On 16,
    # of two machines: 6 * 12e9 / 16 / 1.4e10 = 0.32 s are less than the 1.286 s of gathering; the step takes half.
    small = UpdateConfig(tokens_per_microbatch=512)
    beside = replace(work(update=small), offload=True)
    assert layouts.update_seconds(beside, PLAIN, 1) == pytest.approx(81 * 12 / 14 + 0.14)
    assert layouts.update_seconds(beside, PLAIN, 16) == pytest.approx(72 / 56 + 0.07)
    # Left on the card: two layers in float32 and what no layer has, activations, and the reserve.
    gathered = 4 * (2 * 90_000_000 + 10**9 - 900_000_000)
    assert rank_bytes(beside, 1) == pytest.approx(rank_bytes(work(update=small), 1) - 16e9 + gathered)
    assert rank_bytes(replace(work(), offload=True), 1) == rank_bytes(replace(work(), offload=True), 8)
    adapted = replace(work(update=UpdateConfig(lora=LoraConfig(rank=8))), offload=True)
    assert rank_bytes(adapted, 1) == rank_bytes(replace(adapted, offload=False), 1)


def test_rollouts_by_hand() -> None:
    # 100 sequences at once: a step reads 2e9 bytes of weights and 100 times half of 2 * 10 * 100 * 2 * 1100 bytes,
    # 0.22e9, at 0.6e12 bytes/s: 3.7 ms, and 0.2 ms of kernels: 400 steps make 1.56 s. The longest: 1000 steps with a
    # quarter of them, (2e9 + 0.055e9) / 0.6e12 + 0.0002 = 3.625 ms: 3.625 s. Prefill: 2e9 * 1000 / 0.5e14 = 0.04 s.
    assert rollout_seconds(work(), PLAIN, 1, 1) == pytest.approx(3.665, rel=1e-3)


@pytest.mark.parametrize("engines", [1, 2, 4, 8])
def test_more_engines_are_never_slower(engines: int) -> None:
    assert rollout_seconds(work(), PLAIN, 2 * engines, 1) <= rollout_seconds(work(), PLAIN, engines, 1) + 1e-9


def test_a_card_holds_less_the_more_ranks_there_are_and_an_adapters_base_whole() -> None:
    held = [rank_bytes(work(), ranks) for ranks in (2, 4, 8, 64)]
    assert held == sorted(held, reverse=True) and held[0] > held[-1]
    adapted = work(update=UpdateConfig(lora=LoraConfig(rank=8)))
    assert rank_bytes(adapted, 1) == rank_bytes(adapted, 8)


def test_a_run_ahead_takes_the_longer_part_and_on_one_card_they_take_turns() -> None:
    several, one = best_layout(work(), GPUS["h100"], 8), best_layout(work(), GPUS["h100"], 1)
    assert not isinstance(several, str) and not isinstance(one, str)
    assert one.shared and one.seconds(1) == one.seconds(0)
    assert several.seconds(1) == pytest.approx(several.sync + max(several.update, several.rollouts))
    assert several.ranks + several.engines * several.width <= 8


def test_a_lora_has_one_learner_because_several_ranks_would_merge_it() -> None:
    both = [best_layout(work(update=UpdateConfig(lora=LoraConfig(rank=rank))), GPUS["h100"], 8) for rank in (0, 8)]
    assert [each.ranks for each in both if not isinstance(each, str)] == [4, 1]


def test_what_does_not_fit_is_told_why() -> None:
    large = replace(SIZE, num_parameters=10**11)
    assert "does not fit: an engine needs 8 of them for the weights alone" in layout_line(work(large), "h100", 4)
    assert "does not fit: if all of them learn, each needs" in layout_line(work(large), "h100", 16)
    with pytest.raises(ConfigError, match="no figures of a GPU 'h1000'"):
        layout_line(work(), "h1000", 4)

"""Which prompts an iteration trains on, and which runs need the reward model."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flows.presets import open_preset
from flows.stages import stages
from rlcore.errors import ConfigError
from rlcore.types import Prompt
from tasks.steps.rl.run import resolve_algorithm, uses_reward_model, window


def prompts(count: int) -> list[Prompt]:
    return [Prompt(prompt_id=str(i), messages=(), token_ids=(i,), reference="", task="t") for i in range(count)]


@given(count=st.integers(1, 12), size=st.integers(1, 5), seed=st.integers(0, 99))
def test_every_epoch_shows_every_prompt_once_in_an_order_of_its_own(count: int, size: int, seed: int) -> None:
    total = 2 * count
    drawn = [p.prompt_id for start in range(0, total, size) for p in window(prompts(count), start, size, seed=seed)]
    assert sorted(drawn[:count]) == sorted(drawn[count : 2 * count]) == sorted(map(str, range(count)))


def test_a_window_depends_on_its_place_alone_so_a_resumed_run_sees_the_same_prompts() -> None:
    straight = [p.prompt_id for start in (0, 4, 8) for p in window(prompts(10), start, 4, seed=1)]
    assert [p.prompt_id for p in window(prompts(10), 8, 4, seed=1)] == straight[8:]


def test_an_unknown_algorithm_is_refused_with_the_known_ones() -> None:
    rl = dataclasses.replace(open_preset("tiny").grpo, algorithm="grop")
    with pytest.raises(ConfigError, match="grpo"):
        resolve_algorithm(rl)


def test_a_constant_without_a_meaning_is_refused_before_any_stage_is_made() -> None:
    config = open_preset("tiny", ["grpo.algorithm=sapo", "grpo.update.objective.clip_low=0.1"])
    with pytest.raises(ConfigError, match="clip_low means nothing for sapo"):
        stages(config)
    with pytest.raises(ConfigError, match="unknown algorithm 'grop'"):
        stages(open_preset("tiny", ["grpo.algorithm=grop"]))


def test_constants_reach_the_row_of_a_run() -> None:
    rl = open_preset("tiny", ["grpo.algorithm=dapo", "grpo.update.objective.clip_high=0.5"]).grpo
    surrogate: Any = resolve_algorithm(rl).surrogate
    assert surrogate.keywords == {"clip_low": 0.2, "clip_high": 0.5}


def test_the_reward_model_is_an_input_where_a_reward_or_the_critic_needs_it() -> None:
    config = open_preset("tiny")
    assert not uses_reward_model(config.grpo)
    assert uses_reward_model(config.ppo)
    without = dataclasses.replace(config.ppo, rewards=config.grpo.rewards)
    critic = dataclasses.replace(without.critic, initialise_from="reward_model")
    assert not uses_reward_model(without)
    assert uses_reward_model(dataclasses.replace(without, critic=critic))

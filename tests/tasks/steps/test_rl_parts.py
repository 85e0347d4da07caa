"""Which algorithm a preset means, and which runs need the reward model."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from flows.presets import open_preset
from flows.stages import stages
from rlcore.algorithms.settings import resolve_algorithm
from rlcore.errors import ConfigError
from tasks.steps.rl_parts import uses_reward_model


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

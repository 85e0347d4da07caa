from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from rlcore.algorithms.resolve import resolve_algorithm
from rlcore.config import RlConfig
from rlcore.errors import ConfigError
from rlcore.flows.presets import open_preset
from rlcore.flows.stages import stages
from rlcore.tasks.kinds.rl.kind import RlStage
from rlcore.tasks.steps.external import needed_reward_models


def settings(preset: str, stage: str, *overrides: str) -> RlConfig:
    return open_preset(preset, overrides).stage(stage, RlStage).settings


def test_an_unknown_algorithm_is_refused_with_the_known_ones() -> None:
    rl = dataclasses.replace(settings("tiny", "grpo"), algorithm="grop")
    with pytest.raises(ConfigError, match="grpo"):
        resolve_algorithm(rl)


def test_a_constant_without_a_meaning_is_refused_before_any_stage_is_made() -> None:
    config = open_preset("tiny", ["stages.grpo.algorithm=sapo", "stages.grpo.update.objective.clip_low=0.1"])
    with pytest.raises(ConfigError, match="sapo does not use clip_low"):
        stages(config)
    with pytest.raises(ConfigError, match="unknown algorithm 'grop'"):
        stages(open_preset("tiny", ["stages.grpo.algorithm=grop"]))


def test_constants_reach_the_row_of_a_run() -> None:
    overrides = ("stages.grpo.algorithm=dapo", "stages.grpo.update.objective.clip_high=0.5")
    rl = settings("tiny", "grpo", *overrides)
    surrogate: Any = resolve_algorithm(rl).surrogate
    assert surrogate.keywords == {"clip_low": 0.2, "clip_high": 0.5}


def test_a_reward_model_is_an_input_where_a_reward_or_the_critic_needs_it() -> None:
    grpo, ppo = settings("tiny", "grpo"), settings("tiny", "ppo")
    assert needed_reward_models(grpo) == ()
    assert needed_reward_models(ppo) == ("reward_model",)
    without = dataclasses.replace(ppo, rewards=grpo.rewards)
    critic = dataclasses.replace(without.critic, init_from="taste")
    assert needed_reward_models(without) == ()
    assert needed_reward_models(dataclasses.replace(without, critic=critic)) == ("taste",)
    assert needed_reward_models(dataclasses.replace(ppo, critic=critic)) == ("reward_model", "taste")

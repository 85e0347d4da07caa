"""The loops over floats agree with the library, of which they share no line, for every algorithm and setting."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from rlcore.algorithms.table import ALGORITHMS, resolve_algorithm
from rlcore.config import CriticConfig, GaeConfig, KlConfig, ObjectiveConfig, RlConfig, UpdateConfig
from rlcore.models.heads import ScalarHeadModel
from rlcore.training.audit.reference_impl import ROWS, expected, row_of, token_weights
from rlcore.training.experience import Experience
from rlcore.types import Score, ScoredRollout
from tests import learners, strategies

SETTINGS: dict[str, dict[str, Any]] = {
    **{name: {"algorithm": name} for name in ALGORITHMS},
    **{
        scale: {"algorithm": "grpo", "update": UpdateConfig(objective=ObjectiveConfig(scale=scale))}
        for scale in ("group_sample", "batch", "batch_sample", "none")
    },
    "kl in the reward": {"algorithm": "grpo", "kl": KlConfig(coefficient=0.2, apply_to="reward")},
    "kl in the reward of ppo": {"algorithm": "ppo", "kl": KlConfig(coefficient=0.2, apply_to="reward")},
    "ppo_penalty": {"algorithm": "ppo_penalty", "update": UpdateConfig(num_epochs=2)},
    "distil": {"algorithm": "distil", "kl": KlConfig(coefficient=1.0, apply_to="reward")},
    "masked": {"algorithm": "grpo", "update": UpdateConfig(truncated_completions="mask")},
    "zero": {"algorithm": "rloo", "update": UpdateConfig(truncated_completions="zero")},
    "values beyond the end": {"algorithm": "ppo", "critic": CriticConfig(gae=GaeConfig(bootstrap_truncated=True))},
    "vapo": {"algorithm": "ppo", "critic": CriticConfig(lam=0.9, gae=GaeConfig(lam_alpha=0.5, lam_value=1.0))},
}


def scored(policy: Any) -> list[list[ScoredRollout]]:
    """Groups with a cut completion, one that was not scored, one whose turns are paid, and a group of equal rewards."""
    groups = strategies.random_groups(policy, 3, num_prompts=4, group_size=4)
    first = groups[0]
    first[0] = dataclasses.replace(first[0], rollout=dataclasses.replace(first[0].rollout, finish_reason="length"))
    first[1] = dataclasses.replace(first[1], score=Score(value=None, terms={}, error="no"))
    groups[1][0] = dataclasses.replace(groups[1][0], score=Score(value=0.7, terms={}, turn_rewards=(0.3,)))
    groups[2] = [dataclasses.replace(item, score=Score(value=0.7, terms={})) for item in groups[2]]
    return groups


def experience_of(groups: list[list[ScoredRollout]], config: RlConfig, policy: Any) -> Experience:
    algorithm, critic = resolve_algorithm(config), None
    if algorithm.uses_critic:
        critic = ScalarHeadModel.with_random_head(strategies.tiny_llama(seed=1), torch.Generator().manual_seed(2))
    return learners.experience_of(
        groups,
        algorithm,
        policy,
        strategies.tiny_llama(seed=5),
        critic,
        bootstrap_truncated=config.critic.gae.bootstrap_truncated,
        kl=config.kl,
        kl_coefficient=config.kl.coefficient,
        truncated=config.update.truncated_completions,
    )


@pytest.mark.parametrize("name", SETTINGS)
def test_advantages_and_returns_are_those_of_the_library(name: str) -> None:
    config, policy = strategies.rl_config(**SETTINGS[name]), strategies.tiny_llama()
    groups = scored(policy)
    experience = experience_of(groups, config, policy)
    samples, beyond = experience.samples, experience.next_values
    assert any(beyond) == (name == "values beyond the end")
    penalty = config.kl.coefficient if config.kl.apply_to == "reward" else 0.0
    found = expected(groups, samples, config, penalty=penalty, next_values=beyond)
    assert found is not None
    assert len(found.advantages) == len(samples) == 16 - 1 - (name == "masked")
    assert any(bool(sample.advantages.any()) for sample in samples)
    for place, sample in enumerate(samples):
        assert found.advantages[place] == pytest.approx(sample.advantages.tolist(), abs=2e-6)
        if found.returns is not None:
            assert found.returns[place] == pytest.approx(sample.returns.tolist(), abs=2e-6)


@pytest.mark.parametrize("weighting", [None, "token_mean", "sequence_mean", "sequence_sum", "constant"])
@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo"])
def test_weights_are_those_of_the_library(name: str, weighting: Any) -> None:
    config = strategies.rl_config(name, update=UpdateConfig(objective=ObjectiveConfig(weighting=weighting)))
    masks = [[True, False, True], [False, False, False], [True, True, False]]
    for episodes in ([0, 1, 2], [4, 4, 2]):  # one sample each, and two of the first
        ours = torch.tensor(token_weights(masks, episodes, config))
        assert torch.allclose(ours, resolve_algorithm(config).weighting(torch.tensor(masks), torch.tensor(episodes)))


def test_every_algorithm_is_written_down_and_another_one_is_left_alone() -> None:
    assert set(ROWS) == set(ALGORITHMS)
    other = strategies.rl_config("mine")
    assert row_of(other) is None
    assert expected([], [], other, penalty=0.0, next_values=()) is None

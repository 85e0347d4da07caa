"""Reward that an episode's environment returns, or its agent posts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlcore.rewards.base import failed_score, scored
from rlcore.types import Rollout, Score


@dataclass(frozen=True, kw_only=True)
class EnvironmentOptions:
    """Options of the reward ``environment``: none."""


class EnvironmentReward:
    """Value of ``get_reward`` of the environment, or of ``POST /v1/reward`` of the agent; unscored without one."""

    name = "environment"

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        return [
            failed_score("neither environment nor agent gave a reward")
            if rollout.environment_reward is None
            else scored(self.name, rollout.environment_reward)
            for rollout in rollouts
        ]

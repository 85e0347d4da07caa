"""What the episode's environment says that it was worth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlcore.rewards.base import failed_score, scored
from rlcore.types import Rollout, Score


@dataclass(frozen=True, kw_only=True)
class EnvironmentOptions:
    """The reward of an environment has no options: they are the environment's own."""


class EnvironmentReward:
    """What ``get_reward`` of the environment returned when the episode was over; unscored where it returned None."""

    name = "environment"

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        return [
            failed_score("the environment gave no reward")
            if rollout.environment_reward is None
            else scored(self.name, rollout.environment_reward)
            for rollout in rollouts
        ]

"""The reward model as a reward: a scoring function that is passed in, centred, scaled and clipped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from rlcore.config import NonNegativeFloat, PositiveFloat
from rlcore.errors import RewardError
from rlcore.rewards.base import graded
from rlcore.types import Rollout, Score

ScoreTokens = Callable[[Sequence[tuple[Sequence[int], Sequence[int]]]], torch.Tensor]
"""From N pairs (prompt ids, completion ids) to scores [N]."""


@dataclass(frozen=True, kw_only=True)
class RewardModelOptions:
    """``clip`` > 0 bounds the reward to ±clip, after ``(score - shift) / scale``.

    Shift and scale come on top of the centring that is stored with the model.
    """

    shift: float = 0.0
    scale: PositiveFloat = 1.0
    clip: NonNegativeFloat = 0.0


class RewardModelReward:
    """``(score - shift) / scale``, clipped. Reads token ids as they were sampled, never the text."""

    name = "reward_model"

    def __init__(self, options: RewardModelOptions, score_tokens: ScoreTokens) -> None:
        self._options, self._score_tokens = options, score_tokens

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        """
        Raises:
            RewardError: the scoring function returned another number of scores than it was given pairs.
        """
        if not rollouts:
            return []
        raw = self._score_tokens([(rollout.prompt.token_ids, rollout.completion_ids) for rollout in rollouts])
        if raw.shape != (len(rollouts),):
            raise RewardError(f"the reward model returned {tuple(raw.shape)} scores for {len(rollouts)} completions")
        values = (raw.detach().double() - self._options.shift) / self._options.scale
        if self._options.clip > 0.0:
            values = values.clamp(-self._options.clip, self._options.clip)
        return [graded(self.name, value) for value in values.tolist()]

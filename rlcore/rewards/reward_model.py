"""Reward model as a reward: an injected scoring function, centered, scaled and clipped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from rlcore.config import NonNegativeFloat, PositiveFloat
from rlcore.errors import RewardError
from rlcore.types import Rollout, Score

if TYPE_CHECKING:
    import torch

    from rlcore.models.reward_ensemble import RewardModel

TokenItems = Sequence[tuple[Sequence[int], Sequence[int]]]
"""N pairs of prompt ids and completion ids."""


class ScoreTokens(Protocol):
    """Function from N items to centered rewards [M, N] of the reward model's M members.

    The unit is the standard deviation of its reference set, or with ``calibrated`` log-odds of being preferred.
    """

    def __call__(self, items: TokenItems, *, calibrated: bool) -> torch.Tensor: ...


def token_scorer(model: RewardModel, tokens_per_microbatch: int) -> ScoreTokens:
    """Return the scoring function of a trained reward model with this micro-batch size."""
    from rlcore.text.packing import TokenSequence  # brings torch, which checks of a preset do without

    def score(items: TokenItems, *, calibrated: bool) -> torch.Tensor:
        sequences = [TokenSequence(prompt_ids=tuple(p), completion_ids=tuple(c)) for p, c in items]
        return model.rewards(sequences, tokens_per_microbatch=tokens_per_microbatch, calibrated=calibrated)

    return score


@dataclass(frozen=True, kw_only=True)
class RewardModelOptions:
    """Options of the reward ``reward_model``: ``(score - shift) / scale``, in addition to the model's stored centering.

    Attributes:
        clip: Bound the reward to ±clip; 0 disables it.
        uncertainty_penalty: Factor of the ensemble's standard deviation, which is subtracted.
        calibrated: Use log-odds at the temperature that is stored with the model.
    """

    shift: float = 0.0
    scale: PositiveFloat = 1.0
    clip: NonNegativeFloat = 0.0
    uncertainty_penalty: NonNegativeFloat = 0.0
    calibrated: bool = False


class RewardModelReward:
    """``(score - shift) / scale``, clipped, with score = mean - uncertainty_penalty · std over the members.

    It reads sampled token ids, not the text. The term ``<name>_std`` is the standard deviation over the members.
    """

    def __init__(self, options: RewardModelOptions, score_tokens: ScoreTokens, *, name: str = "reward_model") -> None:
        self._options, self._score_tokens, self.name = options, score_tokens, name

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        """Score a batch.

        Raises:
            RewardError: The number of scores differs from the number of completions, or a penalty on a single member.
        """
        if not rollouts:
            return []
        items = [(rollout.prompt.token_ids, rollout.completion_ids) for rollout in rollouts]
        scores = self._score_tokens(items, calibrated=self._options.calibrated).detach().double()
        if scores.ndim != 2 or scores.shape[1] != len(rollouts):
            raise RewardError(f"the reward model returned {tuple(scores.shape)} scores for {len(rollouts)} completions")
        if self._options.uncertainty_penalty > 0.0 and len(scores) == 1:
            raise RewardError(
                "an uncertainty penalty needs an ensemble, and the reward model has one member",
                where="rewards: uncertainty_penalty",
                fix="set reward_model.ensemble to 3 or more, or uncertainty_penalty to 0",
            )
        spread = scores.std(dim=0, unbiased=False)
        values = scores.mean(dim=0) - self._options.uncertainty_penalty * spread
        values = (values - self._options.shift) / self._options.scale
        if self._options.clip > 0.0:
            values = values.clamp(-self._options.clip, self._options.clip)
        rows = [{self.name: value} for value in values.tolist()]
        if len(scores) > 1:
            rows = [terms | {f"{self.name}_std": std} for terms, std in zip(rows, spread.tolist(), strict=True)]
        return [Score(value=terms[self.name], terms=terms) for terms in rows]

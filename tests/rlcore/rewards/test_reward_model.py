"""The reward model as a reward: token ids in, centred scores out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from rlcore.errors import RewardError
from rlcore.rewards.reward_model import RewardModelOptions, RewardModelReward
from rlcore.types import Rollout

Items = Sequence[tuple[Sequence[int], Sequence[int]]]


def count_tokens(items: Items, *, calibrated: bool) -> torch.Tensor:
    return torch.tensor([[float(100 * len(prompt) + len(completion)) for prompt, completion in items]])


def three_members(items: Items, *, calibrated: bool) -> torch.Tensor:
    """On every item 1, 2 and 6: mean 3, population std sqrt((4 + 1 + 9) / 3) = 2.160247; ten times as calibrated."""
    return torch.tensor([[1.0], [2.0], [6.0]]).repeat(1, len(items)) * (10.0 if calibrated else 1.0)


def test_a_score_is_shifted_scaled_and_clipped(make_rollout: Callable[..., Rollout]) -> None:
    """Prompts of 2 tokens: scores 201, 205, 209; minus 203, over 2: -1, 1, 3; clipped at 2."""
    rollouts = [make_rollout("", num_tokens=count) for count in (1, 5, 9)]
    options = RewardModelOptions(shift=203.0, scale=2.0, clip=2.0)
    scores = RewardModelReward(options, count_tokens)(rollouts)
    assert [score.value for score in scores] == [-1.0, 1.0, 2.0]
    assert scores[0].terms == {"reward_model": -1.0}


def test_without_options_the_score_is_the_models(make_rollout: Callable[..., Rollout]) -> None:
    assert RewardModelReward(RewardModelOptions(), count_tokens)([make_rollout("")])[0].value == 201.0


def test_no_rollouts_ask_the_model_nothing() -> None:
    def fail(items: Items, *, calibrated: bool) -> torch.Tensor:
        raise AssertionError

    assert RewardModelReward(RewardModelOptions(), fail)([]) == []


@pytest.mark.parametrize("shape", [(2,), (2, 1), ()])
def test_another_number_of_scores_is_refused(make_rollout: Callable[..., Rollout], shape: tuple[int, ...]) -> None:
    reward = RewardModelReward(RewardModelOptions(), lambda items, calibrated: torch.zeros(shape))
    with pytest.raises(RewardError, match="2 completions"):
        reward([make_rollout(""), make_rollout("")])


def test_the_members_disagreement_is_a_penalty_and_a_part(make_rollout: Callable[..., Rollout]) -> None:
    # 3 - 0.5 * 2.160247 = 1.919877
    options = RewardModelOptions(uncertainty_penalty=0.5)
    (score,) = RewardModelReward(options, three_members)([make_rollout("")])
    assert score.value == pytest.approx(1.919877, abs=1e-6)
    assert score.terms == {"reward_model": score.value, "reward_model_std": pytest.approx(2.160247, abs=1e-6)}


def test_without_a_penalty_an_ensembles_reward_is_its_mean(make_rollout: Callable[..., Rollout]) -> None:
    assert RewardModelReward(RewardModelOptions(), three_members)([make_rollout("")])[0].value == 3.0
    calibrated = RewardModelOptions(calibrated=True)
    assert RewardModelReward(calibrated, three_members)([make_rollout("")])[0].value == 30.0


def test_a_penalty_on_a_single_member_is_refused(make_rollout: Callable[..., Rollout]) -> None:
    with pytest.raises(RewardError, match="needs an ensemble"):
        RewardModelReward(RewardModelOptions(uncertainty_penalty=0.5), count_tokens)([make_rollout("")])

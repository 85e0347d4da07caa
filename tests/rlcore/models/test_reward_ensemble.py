"""Ensembles: what members share, what they keep for themselves, and how they come back from disk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlcore.errors import ModelError
from rlcore.models.heads import ScalarHeadModel, score_rewards
from rlcore.models.reward_ensemble import (
    RewardModel,
    keep_layers,
    last_states,
    load_reward_model,
    raw_scores,
    save_members,
    share_frozen,
)
from rlcore.models.reward_scale import RewardScale, RewardScales
from tests import strategies
from tests.learners import weights_of

SEQUENCES = strategies.random_sequences(0)
BUDGET = {"tokens_per_microbatch": 64}


def members(count: int, layers: int) -> list[ScalarHeadModel]:
    """Members whose last layers and heads differ."""
    first = ScalarHeadModel.with_random_head(strategies.tiny_llama(), torch.Generator().manual_seed(0))
    first.train_last_layers(layers)
    made = [first, *(share_frozen(first) for _ in range(1, count))]
    with torch.no_grad():
        for number, member in enumerate(made):
            for parameter in member.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.1 * number)
    return made


@pytest.mark.parametrize("layers", [-1, 0, 1])
def test_members_share_what_is_frozen_and_nothing_else(layers: int) -> None:
    first, second = members(2, layers)
    for (name, one), (_, other) in zip(first.named_parameters(), second.named_parameters(), strict=True):
        assert (one is other) == (not one.requires_grad), name
    assert (first.backbone is second.backbone) == (layers == 0)


@pytest.mark.parametrize("layers", [-1, 0, 1])
def test_an_ensemble_comes_back_from_disk_and_scores_as_before(layers: int, tmp_path: Path) -> None:
    made = members(3, layers)
    before = raw_scores(made, SEQUENCES, **BUDGET)
    assert not torch.allclose(before[0], before[1])
    save_members(made, tmp_path)
    scale = RewardScale(shift=0.0, scale=1.0)
    RewardScales(members=(scale,) * 3).save(tmp_path)
    backbone = strategies.tiny_llama()
    backbone.load_state_dict(made[0].backbone.state_dict())
    loaded = load_reward_model(backbone, tmp_path)
    torch.testing.assert_close(loaded.rewards(SEQUENCES, **BUDGET), before, rtol=1e-6, atol=1e-6)
    assert not any(parameter.requires_grad for member in loaded.members for parameter in member.parameters())


def test_heads_on_one_backbone_score_as_each_by_itself() -> None:
    made = members(2, 0)
    apart = torch.stack([score_rewards(member, SEQUENCES, **BUDGET) for member in made])
    torch.testing.assert_close(raw_scores(made, SEQUENCES, **BUDGET), apart, rtol=1e-5, atol=1e-5)


def test_rewards_are_freed_of_length_centred_and_scaled_for_each_member() -> None:
    made, lengths = members(2, 1), torch.tensor([float(len(s.completion_ids)) for s in SEQUENCES])
    first = RewardScale(shift=0.5, scale=2.0, length_slope=0.3)
    model = RewardModel(members=tuple(made), scales=RewardScales(members=(first, first), temperature=4.0))
    raw = raw_scores(made, SEQUENCES, **BUDGET)
    expected = raw - 0.3 * lengths.log() - 0.5
    torch.testing.assert_close(model.rewards(SEQUENCES, **BUDGET), expected / 2.0)
    torch.testing.assert_close(model.rewards(SEQUENCES, calibrated=True, **BUDGET), expected / 4.0)


def test_a_member_that_is_missing_or_of_another_backbone_is_named(tmp_path: Path) -> None:
    made = members(2, 1)
    save_members(made, tmp_path)
    scale = RewardScale(shift=0.0, scale=1.0)
    RewardScales(members=(scale,) * 3).save(tmp_path)
    with pytest.raises(ModelError, match="a member of the ensemble is missing"):
        load_reward_model(made[0].backbone, tmp_path)
    RewardScales(members=(scale,) * 2).save(tmp_path)
    with pytest.raises(ModelError, match="the backbone has no weight"):
        load_reward_model(strategies.tiny_llama(num_hidden_layers=1), tmp_path)


def test_a_backbone_cut_after_its_first_layers_gives_their_state() -> None:
    whole, cut = strategies.tiny_llama(), strategies.tiny_llama()
    seen: list[torch.Tensor] = []
    whole.model.layers[0].register_forward_hook(lambda _, __, output: seen.append(output))
    ids = torch.tensor([SEQUENCES[0].prompt_ids + SEQUENCES[0].completion_ids])
    whole.model(ids)
    keep_layers(cut, 1)
    assert cut.config.num_hidden_layers == len(cut.model.layers) == 1
    state = last_states(cut, SEQUENCES[:1], **BUDGET)[0]
    torch.testing.assert_close(state, whole.model.norm(seen[0])[0, -1].detach(), rtol=1e-5, atol=1e-5)


def test_no_cut_leaves_the_backbone_as_it_is_and_too_long_a_one_is_refused() -> None:
    backbone = strategies.tiny_llama()
    before = weights_of(backbone)
    keep_layers(backbone, 0)
    assert torch.equal(weights_of(backbone), before)
    with pytest.raises(ModelError, match="has 2 layers"):
        keep_layers(backbone, 3)

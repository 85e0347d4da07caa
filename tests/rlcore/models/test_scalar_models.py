"""Scalar heads, ensembles of reward models, and their scales."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlcore.errors import DataError, ModelError
from rlcore.models.heads import ScalarHeadModel, load_scalar_model, save_head, score_rewards, score_values
from rlcore.models.reward_ensemble import (
    RewardModel,
    RewardScale,
    RewardScales,
    fit_length_slope,
    keep_layers,
    last_states,
    load_reward_model,
    measure_scale,
    raw_scores,
    save_members,
    share_frozen,
)
from rlcore.text.packing import TokenSequence
from tests import strategies
from tests.learners import weights_of


def random_head(seed: int = 0) -> ScalarHeadModel:
    return ScalarHeadModel.with_random_head(strategies.tiny_llama(), torch.Generator().manual_seed(seed))


def state(model: ScalarHeadModel, tokens: tuple[int, ...]) -> torch.Tensor:
    """The scalar at the last of some tokens, from an unpacked forward pass."""
    states = model.backbone.base_model(torch.tensor([tokens])).last_hidden_state
    value: torch.Tensor = model.head(states[0, -1]).squeeze()
    return value


@torch.no_grad()
@pytest.mark.parametrize("budget", [1, 25])
def test_value_is_read_before_token(budget: int) -> None:
    model, sequences = random_head(), strategies.random_sequences(0)
    for sequence, values in zip(sequences, score_values(model, sequences, tokens_per_microbatch=budget), strict=True):
        expected = [
            state(model, sequence.prompt_ids + sequence.completion_ids[:t]) for t in range(len(sequence.completion_ids))
        ]
        torch.testing.assert_close(values, torch.stack(expected), rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("budget", [1, 25])
def test_score_is_read_at_last_token(budget: int) -> None:
    model, sequences = random_head(), strategies.random_sequences(1)
    scores = score_rewards(model, sequences, tokens_per_microbatch=budget)
    expected = [state(model, sequence.prompt_ids + sequence.completion_ids) for sequence in sequences]
    torch.testing.assert_close(scores, torch.stack(expected), rtol=1e-5, atol=1e-5)


def test_fresh_critic_predicts_zero() -> None:
    critic = ScalarHeadModel.on_backbone(strategies.tiny_llama())
    values = score_values(critic, strategies.random_sequences(0), tokens_per_microbatch=100)
    assert all(not bool(value.any()) for value in values)


def test_reward_head_has_documented_std() -> None:
    model = ScalarHeadModel.with_random_head(
        strategies.tiny_llama(hidden_size=512, num_attention_heads=4), torch.Generator().manual_seed(0)
    )
    # N(0, 1/sqrt(H + 1)): std 513 ** -0.5 = 0.04415; 512 draws estimate it to some 3 %.
    assert float(model.head.weight.detach().std()) == pytest.approx(0.04415, rel=0.1)
    assert torch.equal(random_head(5).head.weight, random_head(5).head.weight)
    assert not torch.equal(random_head(5).head.weight, random_head(6).head.weight)


def test_train_last_layers() -> None:
    model = random_head()
    model.train_last_layers(1)
    learning = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    last = {name for name, _ in model.named_parameters() if name.startswith("backbone.model.layers.1.")}
    assert len(last) > 5
    assert learning == last | {"backbone.model.norm.weight", "head.weight"}
    for count, is_learning in ((-1, True), (0, False)):
        model = random_head()
        model.train_last_layers(count)
        assert {parameter.requires_grad for parameter in model.backbone.parameters()} == {is_learning}
        assert model.head.weight.requires_grad


def test_backbone_without_layers_cannot_be_frozen_in_part() -> None:
    model = random_head()
    del model.backbone.model.layers
    with pytest.raises(ModelError, match=r"backbone\.trainable_layers"):
        model.train_last_layers(1)


def test_head_round_trip(tmp_path: Path) -> None:
    model = random_head()
    save_head(model, tmp_path)
    loaded = load_scalar_model(model.backbone, tmp_path)
    sequences = [TokenSequence(prompt_ids=(1,), completion_ids=(2, 3))]
    before, after = (score_rewards(m, sequences, tokens_per_microbatch=10) for m in (model, loaded))
    assert torch.equal(before, after)


def test_missing_head_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="scalar head not found") as caught:
        load_scalar_model(strategies.tiny_llama(), tmp_path)
    assert caught.value.where.startswith(str(tmp_path))


def test_head_of_other_width_is_refused(tmp_path: Path) -> None:
    save_head(random_head(), tmp_path)
    with pytest.raises(ModelError, match=r"head has shape \(1, 24\), but the backbone needs \(1, 32\)"):
        load_scalar_model(strategies.tiny_llama(hidden_size=32), tmp_path)


SEQUENCES = strategies.random_sequences(0)
BUDGET = {"tokens_per_microbatch": 64}


def members(count: int, layers: int) -> list[ScalarHeadModel]:
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
def test_members_share_frozen_weights(layers: int) -> None:
    first, second = members(2, layers)
    for (name, one), (_, other) in zip(first.named_parameters(), second.named_parameters(), strict=True):
        assert (one is other) == (not one.requires_grad), name
    assert (first.backbone is second.backbone) == (layers == 0)


@pytest.mark.parametrize("layers", [-1, 0, 1])
def test_ensemble_round_trip(layers: int, tmp_path: Path) -> None:
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


def test_heads_on_one_backbone_score_alike() -> None:
    made = members(2, 0)
    apart = torch.stack([score_rewards(member, SEQUENCES, **BUDGET) for member in made])
    torch.testing.assert_close(raw_scores(made, SEQUENCES, **BUDGET), apart, rtol=1e-5, atol=1e-5)


def test_rewards_are_debiased_centered_and_scaled() -> None:
    made, lengths = members(2, 1), torch.tensor([float(len(s.completion_ids)) for s in SEQUENCES])
    first = RewardScale(shift=0.5, scale=2.0, length_slope=0.3)
    model = RewardModel(members=tuple(made), scales=RewardScales(members=(first, first), temperature=4.0))
    raw = raw_scores(made, SEQUENCES, **BUDGET)
    expected = raw - 0.3 * lengths.log() - 0.5
    torch.testing.assert_close(model.rewards(SEQUENCES, **BUDGET), expected / 2.0)
    torch.testing.assert_close(model.rewards(SEQUENCES, calibrated=True, **BUDGET), expected / 4.0)


def test_missing_member_is_named(tmp_path: Path) -> None:
    made = members(2, 1)
    save_members(made, tmp_path)
    scale = RewardScale(shift=0.0, scale=1.0)
    RewardScales(members=(scale,) * 3).save(tmp_path)
    with pytest.raises(ModelError, match="a member of the ensemble is missing"):
        load_reward_model(made[0].backbone, tmp_path)
    RewardScales(members=(scale,) * 2).save(tmp_path)
    with pytest.raises(ModelError, match="the backbone has no weight"):
        load_reward_model(strategies.tiny_llama(num_hidden_layers=1), tmp_path)


def test_keep_layers_by_hand() -> None:
    whole, cut = strategies.tiny_llama(), strategies.tiny_llama()
    seen: list[torch.Tensor] = []
    whole.model.layers[0].register_forward_hook(lambda _, __, output: seen.append(output))
    ids = torch.tensor([SEQUENCES[0].prompt_ids + SEQUENCES[0].completion_ids])
    whole.model(ids)
    keep_layers(cut, 1)
    assert cut.config.num_hidden_layers == len(cut.model.layers) == 1
    state = last_states(cut, SEQUENCES[:1], **BUDGET)[0]
    torch.testing.assert_close(state, whole.model.norm(seen[0])[0, -1].detach(), rtol=1e-5, atol=1e-5)


def test_keep_layers_bounds() -> None:
    backbone = strategies.tiny_llama()
    before = weights_of(backbone)
    keep_layers(backbone, 0)
    assert torch.equal(weights_of(backbone), before)
    with pytest.raises(ModelError, match="has 2 layers"):
        keep_layers(backbone, 3)


def test_scale_by_hand() -> None:
    # 1, 3, 5: mean 3, population variance (4 + 0 + 4) / 3 = 2.6667, std 1.6330.
    scores, lengths = torch.tensor([1.0, 3.0, 5.0]), torch.tensor([1.0, 2.0, 3.0])
    scale = measure_scale(scores, lengths)
    assert (scale.shift, scale.scale) == (3.0, pytest.approx(1.6330, abs=5e-5))
    rewards = scale.centered(scores, lengths) / scale.scale
    assert float(rewards.mean()) == pytest.approx(0.0, abs=1e-6)
    assert float(rewards.std(unbiased=False)) == pytest.approx(1.0)


def test_equal_scores_are_only_shifted() -> None:
    scale = measure_scale(torch.full((4,), 0.7), torch.ones(4))
    assert (scale.shift, scale.scale) == (pytest.approx(0.7), 1.0)


def test_length_slope_by_hand() -> None:
    # Margins 2 + 3 x at x = -1, 0, 1, 2: quality 2, slope 3. Through the origin it would be 22 / 6 = 3.67.
    ratios = torch.tensor([-1.0, 0.0, 1.0, 2.0])
    assert fit_length_slope(2.0 + 3.0 * ratios, ratios) == pytest.approx(3.0)


def test_length_slope_needs_different_ratios() -> None:
    with pytest.raises(DataError, match="length bias cannot be measured"):
        fit_length_slope(torch.tensor([1.0, 2.0]), torch.tensor([0.5, 0.5]))


def test_scales_round_trip(tmp_path: Path) -> None:
    members = (RewardScale(shift=0.1, scale=2.0, length_slope=-0.3), RewardScale(shift=1 / 3, scale=1.0))
    scales = RewardScales(members=members, temperature=1.7)
    scales.save(tmp_path)
    assert RewardScales.load(tmp_path) == scales


@pytest.mark.parametrize("text", ["", "[]", '{"members": [{}], "temperature": 1}', '{"members": []}'])
def test_damaged_scales_are_named(tmp_path: Path, text: str) -> None:
    if text:
        (tmp_path / "reward_scale.json").write_text(text)
    with pytest.raises(ModelError, match="cannot be read"):
        RewardScales.load(tmp_path)

"""Scalar heads: the critic reads the state before a token, the reward model the last token; files round-trip."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlcore.errors import ModelError
from rlcore.models.heads import ScalarHeadModel, load_scalar_model, save_head, score_rewards, score_values
from rlcore.text.packing import TokenSequence
from tests import strategies


def random_head(seed: int = 0) -> ScalarHeadModel:
    """A reward model on a tiny backbone."""
    return ScalarHeadModel.with_random_head(strategies.tiny_llama(), torch.Generator().manual_seed(seed))


def state(model: ScalarHeadModel, tokens: tuple[int, ...]) -> torch.Tensor:
    """The scalar at the last of some tokens, from an unpacked forward pass."""
    states = model.backbone.base_model(torch.tensor([tokens])).last_hidden_state
    value: torch.Tensor = model.head(states[0, -1]).squeeze()
    return value


@torch.no_grad()
@pytest.mark.parametrize("budget", [1, 25, 1000])
def test_a_value_is_read_before_its_token_whatever_the_packing(budget: int) -> None:
    model, sequences = random_head(), strategies.random_sequences(0)
    for sequence, values in zip(sequences, score_values(model, sequences, tokens_per_microbatch=budget), strict=True):
        expected = [
            state(model, sequence.prompt_ids + sequence.completion_ids[:t]) for t in range(len(sequence.completion_ids))
        ]
        torch.testing.assert_close(values, torch.stack(expected), rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("budget", [1, 25, 1000])
def test_a_score_is_read_at_the_last_token_in_the_order_of_the_caller(budget: int) -> None:
    model, sequences = random_head(), strategies.random_sequences(1)
    scores = score_rewards(model, sequences, tokens_per_microbatch=budget)
    expected = [state(model, sequence.prompt_ids + sequence.completion_ids) for sequence in sequences]
    torch.testing.assert_close(scores, torch.stack(expected), rtol=1e-5, atol=1e-5)


def test_a_fresh_critic_predicts_exactly_zero() -> None:
    critic = ScalarHeadModel.on_backbone(strategies.tiny_llama())
    values = score_values(critic, strategies.random_sequences(0), tokens_per_microbatch=100)
    assert all(not bool(value.any()) for value in values)


def test_the_reward_head_is_drawn_with_the_documented_spread() -> None:
    model = ScalarHeadModel.with_random_head(
        strategies.tiny_llama(hidden_size=512, num_attention_heads=4), torch.Generator().manual_seed(0)
    )
    # N(0, 1/sqrt(H + 1)): std 513 ** -0.5 = 0.04415; 512 draws estimate it to some 3 %.
    assert float(model.head.weight.detach().std()) == pytest.approx(0.04415, rel=0.1)
    assert torch.equal(random_head(5).head.weight, random_head(5).head.weight)
    assert not torch.equal(random_head(5).head.weight, random_head(6).head.weight)


def test_only_the_last_layers_and_the_head_learn_when_asked() -> None:
    model = random_head()
    model.train_last_layers(1)
    learning = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    last = {name for name, _ in model.named_parameters() if name.startswith("backbone.model.layers.1.")}
    assert len(last) > 5
    assert learning == last | {"backbone.model.norm.weight", "head.weight"}


@pytest.mark.parametrize(("count", "is_learning"), [(-1, True), (0, False)])
def test_the_backbone_learns_as_a_whole_or_not_at_all(count: int, is_learning: bool) -> None:
    model = random_head()
    model.train_last_layers(count)
    assert {parameter.requires_grad for parameter in model.backbone.parameters()} == {is_learning}
    assert model.head.weight.requires_grad


def test_a_backbone_without_a_list_of_layers_cannot_be_frozen_in_part() -> None:
    model = random_head()
    del model.backbone.model.layers
    with pytest.raises(ModelError, match=r"backbone\.trainable_layers"):
        model.train_last_layers(1)


def test_a_head_lies_beside_its_backbone_and_comes_back_bit_for_bit(tmp_path: Path) -> None:
    model = random_head()
    save_head(model, tmp_path)
    loaded = load_scalar_model(model.backbone, tmp_path)
    sequences = [TokenSequence(prompt_ids=(1,), completion_ids=(2, 3))]
    before, after = (score_rewards(m, sequences, tokens_per_microbatch=10) for m in (model, loaded))
    assert torch.equal(before, after)


def test_a_missing_head_is_named_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="scalar head not found") as caught:
        load_scalar_model(strategies.tiny_llama(), tmp_path)
    assert caught.value.where.startswith(str(tmp_path))


def test_a_head_of_another_width_is_refused(tmp_path: Path) -> None:
    save_head(random_head(), tmp_path)
    with pytest.raises(ModelError, match=r"head has shape \(1, 24\), but the backbone needs \(1, 32\)"):
        load_scalar_model(strategies.tiny_llama(hidden_size=32), tmp_path)

"""Reward-model training: it learns a rule in seconds, counts prompts and not pairs, and keeps pairs together."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from rlcore.config import BackboneConfig, PreferenceLossConfig, RewardModelConfig
from rlcore.errors import NonFiniteError
from rlcore.models.heads import ScalarHeadModel, score_rewards
from rlcore.training.preferences import TokenPair
from rlcore.training.reward_model import train_reward_model
from tests import strategies
from tests.learners import UNCLIPPED, assert_same, weights_of

GOOD = 5  # the rule: the completion that holds this token is preferred


def pair(
    prompt: tuple[int, ...],
    chosen: tuple[int, ...],
    rejected: tuple[int, ...],
    *,
    set_id: str = "",
    **labels: float,
) -> TokenPair:
    """A preference pair, a set of its own unless said otherwise."""
    name = set_id or f"{prompt}{chosen}{rejected}"
    return TokenPair(set_id=name, prompt_ids=prompt, chosen_ids=chosen, rejected_ids=rejected, **labels)


def rule_pairs(count: int, seed: int) -> list[TokenPair]:
    """Random completions of four to seven tokens; the chosen one ends with the good token, the other lacks it."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(length: int) -> tuple[int, ...]:
        return tuple((torch.randint(6, strategies.VOCABULARY, (length,), generator=generator)).tolist())

    lengths = torch.randint(3, 7, (count, 2), generator=generator).tolist()
    return [pair((1, *tokens(2)), (*tokens(a), GOOD), tokens(b + 1)) for a, b in lengths]


def config(**settings: Any) -> RewardModelConfig:
    """One epoch with brisk learning rates."""
    brisk = {"num_epochs": 1, "batch_size": 16, "learning_rate": 3e-3, "head_learning_rate": 3e-2}
    return RewardModelConfig(**(brisk | settings))


def model(dtype: torch.dtype = torch.float32) -> ScalarHeadModel:
    """A fresh reward model."""
    return ScalarHeadModel.with_random_head(strategies.tiny_llama(dtype=dtype), torch.Generator().manual_seed(0)).to(
        dtype
    )


def train(reward_model: ScalarHeadModel, pairs: list[TokenPair], **settings: Any) -> list[Mapping[str, float]]:
    """The reports of each step."""
    reports: list[Mapping[str, float]] = []
    train_reward_model(
        reward_model, pairs, config(**settings), seed=0, report=lambda _, metrics: reports.append(metrics)
    )
    return reports


def accuracy(reward_model: ScalarHeadModel, pairs: list[TokenPair]) -> float:
    """The share of pairs whose chosen side scores higher."""
    scores = score_rewards(reward_model, [side for each in pairs for side in each.sides], tokens_per_microbatch=512)
    return float((scores[0::2] > scores[1::2]).float().mean())


def test_a_trivial_rule_is_learned_and_holds_on_unseen_pairs() -> None:
    reward_model, held_out = model(), rule_pairs(100, seed=1)
    before = accuracy(reward_model, held_out)
    reports = train(reward_model, rule_pairs(320, seed=0))
    assert before < 0.8
    assert accuracy(reward_model, held_out) > 0.9
    assert len(reports) == 20
    first, last = (sum(r["rm/loss"] for r in part) / 3 for part in (reports[:3], reports[-3:]))
    assert last < 0.5 * first
    assert reports[-1]["rm/accuracy"] > 0.9


def gradient_of_step(pairs: list[TokenPair], **settings: Any) -> torch.Tensor:
    """The gradient, of all weights, of one step over all pairs; float64."""
    gradients: list[torch.Tensor] = []

    def remember(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        gradients.append(torch.cat([p.grad.flatten() for p in parameters]))

    handle = register_optimizer_step_pre_hook(remember)
    train(model(torch.float64), pairs, batch_size=len(pairs), optim=UNCLIPPED, **settings)
    handle.remove()
    return gradients[0]


def reference_gradient(
    pairs: list[TokenPair], weights: list[float], *, margin: float = 0.0, smoothing: float = 0.0
) -> torch.Tensor:
    """The same from one forward pass per sequence and the loss as a plain loop."""
    reward_model = model(torch.float64)
    total = torch.zeros((), dtype=torch.float64)
    for item, weight in zip(pairs, weights, strict=True):
        chosen, rejected = (
            reward_model.head(
                reward_model.backbone.base_model(torch.tensor([item.prompt_ids + side])).last_hidden_state[0, -1]
            )
            for side in (item.chosen_ids, item.rejected_ids)
        )
        p = item.probability * (1 - smoothing) + (1 - item.probability) * smoothing
        lead, lag = ((d - item.margin - margin).squeeze() for d in (chosen - rejected, rejected - chosen))
        total = total + weight * (p * torch.log1p(torch.exp(-lead)) + (1 - p) * torch.log1p(torch.exp(-lag)))
    modules = (reward_model.backbone.base_model, reward_model.head)
    ordered = [
        p for module in modules for matrices in (True, False) for p in module.parameters() if (p.ndim >= 2) == matrices
    ]
    return torch.cat([part.flatten() for part in torch.autograd.grad(total, ordered)])


def ranked_set() -> list[TokenPair]:
    """Three ranked completions of one prompt, and two prompts with a pair of their own, of which one is in doubt."""
    best, middle, worst = (6, 7, 8), (9, 10), (11, 12, 13, 14)
    ranked = [pair((1, 2), *sides, set_id="ranked") for sides in ((best, middle), (best, worst), (middle, worst))]
    return [*ranked, pair((3,), (4, 5), (6,)), pair((4, 4, 4), (7,), (8, 9), margin=0.5, probability=0.8)]


def test_every_set_of_a_minibatch_counts_the_same_whatever_its_number_of_pairs() -> None:
    # Three sets: 1/3 each; the ranked one's third is spread over three pairs, 1/9 each.
    expected = reference_gradient(ranked_set(), [1 / 9] * 3 + [1 / 3] * 2)
    assert_same(gradient_of_step(ranked_set()), expected, 1e-6)


def test_margin_and_smoothing_of_the_configuration_add_to_those_of_the_pair() -> None:
    expected = reference_gradient(ranked_set(), [1 / 9] * 3 + [1 / 3] * 2, margin=0.3, smoothing=0.1)
    loss = PreferenceLossConfig(margin=0.3, label_smoothing=0.1)
    assert_same(gradient_of_step(ranked_set(), loss=loss), expected, 1e-6)


def test_a_completion_of_a_ranked_list_is_computed_once() -> None:
    reward_model, sizes = model(), []
    reward_model.backbone.base_model.register_forward_pre_hook(
        lambda _, __, kwargs: sizes.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    train(reward_model, ranked_set()[:3])
    assert sizes == [2 + 3 + 2 + 4]  # the prompt and each of the three completions; as pairs it would be 3 * 2 + 2 * 9


@pytest.mark.parametrize("budget", [1, 8, 15, 40])
def test_the_gradient_does_not_depend_on_the_micro_batches(budget: int) -> None:
    pairs = [*ranked_set(), *rule_pairs(5, seed=3)]
    whole = gradient_of_step(pairs, tokens_per_microbatch=10_000)
    assert_same(gradient_of_step(pairs, tokens_per_microbatch=budget), whole, 1e-6)


def test_pairs_of_one_prompt_in_a_shared_row_keep_the_token_budget() -> None:
    # Twelve pairs of one prompt would make a row of 4 + 12 * 8 tokens, and pad every other row to its length.
    pairs = [pair((1, 2, 3, 4), (5, 6, 7, i), (8, 9, 10, i), set_id="s") for i in range(11, 23)] + rule_pairs(
        12, seed=0
    )
    reward_model, sizes = model(), []
    reward_model.backbone.base_model.register_forward_pre_hook(
        lambda _, __, kwargs: sizes.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    train(reward_model, pairs, batch_size=24, tokens_per_microbatch=60)
    assert max(sizes) <= 60


def test_a_non_finite_loss_stops_before_the_step() -> None:
    reward_model = model()
    with torch.no_grad():
        reward_model.head.weight[0, 0] = math.nan
    before = weights_of(reward_model.backbone)
    with pytest.raises(NonFiniteError, match="reward model's loss is nan"):
        train(reward_model, rule_pairs(4, seed=0))
    assert torch.equal(weights_of(reward_model.backbone), before)


def test_with_no_trainable_layer_the_head_alone_learns() -> None:
    reward_model = model()
    backbone, head = weights_of(reward_model.backbone), weights_of(reward_model.head)
    train(reward_model, rule_pairs(16, seed=0), backbone=BackboneConfig(trainable_layers=0))
    assert torch.equal(weights_of(reward_model.backbone), backbone)
    assert not torch.equal(weights_of(reward_model.head), head)


def test_the_same_seed_gives_the_same_reward_model_bit_for_bit() -> None:
    results = []
    for _ in range(2):
        reward_model = model()
        train(reward_model, rule_pairs(40, seed=0))
        results.append(weights_of(reward_model))
    assert torch.equal(*results)

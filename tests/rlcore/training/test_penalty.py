"""PPO with an adaptive KL penalty: the KL after an update is measured exactly, and sets the next coefficient."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from rlcore.algorithms.kl import PenaltyController
from rlcore.algorithms.resolve import with_constants
from rlcore.algorithms.table import ALGORITHMS
from rlcore.config import CriticConfig
from rlcore.models.policy import score_sequences
from rlcore.training.learner import Learner
from rlcore.training.minibatches import token_sequences
from rlcore.types import TrainingSample
from tests.learners import assert_same, make_learner, on_policy_samples, update_config, weights_of
from tests.rlcore.training.test_learner import prompts_forwarded, with_silent_group

SEVERAL = update_config(num_epochs=2, num_minibatches=2)


def samples_of(learner: Learner) -> list[TrainingSample]:
    """Samples with the learner's own log-probabilities, one token of them masked and NaN."""
    first, *others = on_policy_samples(learner.policy)
    hole = torch.zeros_like(first.loss_mask).index_fill(0, torch.tensor([0]), True)
    masked = {"loss_mask": first.loss_mask & ~hole, "old_logprobs": first.old_logprobs.masked_fill(hole, torch.nan)}
    return [dataclasses.replace(first, **masked), *others]


def learner_of(target: float = 0.01, *, budget: int = 8192, **settings: object) -> Learner:
    update = dataclasses.replace(SEVERAL, tokens_per_microbatch=budget)
    learner = make_learner("ppo_penalty", **({"update": update, "learning_rate": 1e-3} | settings))
    learner.penalty = PenaltyController(coefficient=1.0, target=target)
    return learner


def test_the_kl_is_that_of_the_last_weights_over_all_tokens_and_sets_the_next_coefficient() -> None:
    learner = learner_of()
    samples = samples_of(learner)
    metrics = learner.update(samples, seed=0).metrics
    after = torch.cat(score_sequences(learner.policy, token_sequences(samples), tokens_per_microbatch=64))
    mask = torch.cat([sample.loss_mask for sample in samples])
    d = (after - torch.cat([sample.old_logprobs for sample in samples]))[mask].double()
    measured = float((d.exp() - d - 1.0).mean())
    assert measured > 1e-6
    assert metrics["kl/after_update"] == pytest.approx(measured, rel=1e-6)
    assert metrics["kl/after_update"] != metrics["kl/old"]  # which has the policy before each step
    assert metrics["kl/penalty_coefficient"] == 1.0
    for target, expected in ((measured / 2, 2.0), (measured, 1.0), (measured * 2, 0.5)):
        other = learner_of(target)
        other.update(samples, seed=0)
        assert other.penalty == PenaltyController(coefficient=expected, target=target)
        assert other.update(samples, seed=1).metrics["kl/penalty_coefficient"] == expected


def test_neither_the_update_nor_the_coefficient_depends_on_micro_batches() -> None:
    whole, small = (learner_of(budget=budget) for budget in (8192, 16))
    samples = samples_of(whole)
    first, second = (learner.update(samples, seed=0).metrics for learner in (whole, small))
    assert first["kl/after_update"] == pytest.approx(second["kl/after_update"], rel=1e-6)
    assert whole.penalty == small.penalty
    assert_same(weights_of(small.policy), weights_of(whole.policy), 1e-9)


def test_a_policy_that_did_not_move_leaves_the_coefficient() -> None:
    learner = learner_of(critic=CriticConfig(warmup_iterations=1))
    samples = samples_of(learner)
    assert "kl/after_update" not in learner.update(samples, seed=0).metrics
    assert learner.penalty == PenaltyController(coefficient=1.0, target=0.01)
    assert "kl/after_update" in learner.update(samples, seed=1).metrics


def test_a_stronger_penalty_keeps_the_policy_nearer() -> None:
    def measured(coefficient: float) -> float:
        learner = learner_of(update=update_config(num_epochs=8))
        learner.penalty = PenaltyController(coefficient=coefficient, target=0.01)
        return learner.update(samples_of(learner), seed=0).metrics["kl/after_update"]

    weak, strong = map(measured, (1e-9, 100.0))
    assert 0.0 < strong < 0.5 * weak


def test_a_vanishing_penalty_is_ppo_without_a_clip() -> None:
    learners = learner_of(), make_learner("ppo", update=SEVERAL, learning_rate=1e-3)
    learners[0].penalty = PenaltyController(coefficient=1e-30, target=0.01)
    learners[1].algorithm = with_constants(ALGORITHMS["ppo"], {"clip_low": 1.0, "clip_high": 1e9})
    samples = samples_of(learners[0])
    for learner in learners:
        learner.update(samples, seed=0)
    assert_same(weights_of(learners[0].policy), weights_of(learners[1].policy), 1e-9)


def test_a_penalty_needs_completions_without_an_advantage_too() -> None:
    learner = make_learner("grpo")
    learner.penalty = PenaltyController(coefficient=1.0, target=0.01)
    assert prompts_forwarded(learner, with_silent_group(5)) == {1, 2, 3}

"""Losses and gradients by formula and plain forward passes are those of an update, and looking leaves no trace."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from rlcore.algorithms.kl import KL_LOSSES
from rlcore.algorithms.settings import resolve_algorithm
from rlcore.algorithms.table import ALGORITHMS
from rlcore.audit.second_pass import MOST_TOKENS, Examined, examine
from rlcore.config import CriticConfig, KlConfig, MismatchConfig, UpdateConfig
from rlcore.models.policy import score_sequences
from rlcore.training.learner import Learner
from rlcore.training.minibatches import token_sequences
from tests import strategies
from tests.learners import UNCLIPPED, make_learner, shared_learner, weights_of

ENTROPY = UpdateConfig(optim=UNCLIPPED, entropy_coefficient=0.01)
SETTINGS: dict[str, dict[str, Any]] = {
    **{name: {"name": name} for name in ALGORITHMS},
    **{kind: {"name": "grpo", "kl": KlConfig(coefficient=0.1, estimator=kind)} for kind in KL_LOSSES},
    "distil": {"name": "distil", "kl": KlConfig(coefficient=1.0, placement="reward")},
    "sequence": {"name": "grpo", "update": dataclasses.replace(ENTROPY, mismatch=MismatchConfig(level="sequence"))},
    "mask": {"name": "dapo", "update": dataclasses.replace(ENTROPY, mismatch=MismatchConfig(mode="mask"))},
    "huber": {"name": "ppo", "critic": CriticConfig(huber_delta=0.1, clip_range=0.05)},
}


def looked_at(learner: Learner, **settings: Any) -> Examined:
    samples = strategies.random_samples(3, dtype=learner.policy.dtype)
    reference = strategies.tiny_llama(seed=5, dtype=learner.policy.dtype)
    return examine(learner, reference, samples, eos_ids=(2,), **({"seed": 1} | settings))


def learner_of(settings: dict[str, Any]) -> Learner:
    learner = make_learner(**({"update": ENTROPY} | settings))
    learner.algorithm = resolve_algorithm(learner.config)
    return learner


@pytest.mark.parametrize("name", SETTINGS)
def test_losses_and_gradients_of_an_update_are_those_of_the_formula(name: str) -> None:
    found = looked_at(learner_of(SETTINGS[name]))
    assert set(found.losses) == ({"loss/policy", "loss/value"} if name in ("ppo", "huber") else {"loss/policy"})
    for theirs, ours, size in found.losses.values():
        assert size > 0.0
        assert theirs == pytest.approx(ours, abs=1e-7 * size)
    assert len(found.gradients) == 2
    for theirs, ours, cosine in found.gradients.values():
        assert theirs == pytest.approx(ours, rel=1e-6)
        assert cosine == pytest.approx(1.0)


@pytest.mark.parametrize("detach", [False, True])
def test_a_critic_on_the_policys_trunk_pulls_at_it_as_the_formula_says(detach: bool) -> None:
    critic = CriticConfig(placement="head", detach=detach)
    for theirs, ours, cosine in looked_at(shared_learner(critic=critic)).gradients.values():
        assert theirs == pytest.approx(ours, rel=1e-6)
        assert cosine == pytest.approx(1.0)


def test_log_probabilities_of_policy_and_reference_are_those_of_the_packed_pass() -> None:
    learner = learner_of({"name": "grpo"})
    found, samples = looked_at(learner), strategies.random_samples(3)
    reference = strategies.tiny_llama(seed=5, dtype=torch.float64)
    for model, columns in ((learner.policy, found.logprobs), (reference, found.ref_logprobs)):
        packed = score_sequences(model, token_sequences(samples), tokens_per_microbatch=64)
        for logprobs, places, column in zip(packed, found.places, columns, strict=True):
            assert torch.allclose(logprobs[list(places)], column, atol=1e-6)


def test_only_tokens_of_the_policys_own_are_looked_at_and_of_very_many_some() -> None:
    learner = learner_of({"name": "grpo"})
    samples = strategies.random_samples(3)
    own = [tuple(sample.loss_mask.nonzero()[:, 0].tolist()) for sample in samples]
    assert list(looked_at(learner).places) == own
    assert max(map(len, own)) <= MOST_TOKENS


def test_looking_moves_nothing_leaves_no_gradient_and_changes_no_update() -> None:
    learner, alone = learner_of({"name": "ppo"}), learner_of({"name": "ppo"})
    before = weights_of(learner.policy)
    looked_at(learner)
    assert torch.equal(before, weights_of(learner.policy))
    assert learner.critic is not None
    assert all(p.grad is None for module in (learner.policy, learner.critic) for p in module.parameters())
    samples = strategies.random_samples(4)
    for each in (learner, alone):
        each.update(samples, seed=0)
    assert torch.equal(weights_of(learner.policy), weights_of(alone.policy))


def test_a_loss_that_leaves_the_kl_out_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"name": "grpo", "kl": KlConfig(coefficient=0.5)}
    learner = learner_of(settings)
    without = dataclasses.replace(learner._coefficients, kl=0.0)
    monkeypatch.setattr(Learner, "_coefficients", without)
    theirs, ours, size = looked_at(learner).losses["loss/policy"]
    assert abs(theirs - ours) > 0.01 * size

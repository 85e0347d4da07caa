"""Losses and gradients by formula and plain forward passes are those of an update."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from rlcore.algorithms.kl import KL_LOSSES
from rlcore.algorithms.table import ALGORITHMS, resolve_algorithm, with_constants
from rlcore.config import CriticConfig, KlConfig, RolloutCorrectionConfig, UpdateConfig
from rlcore.hardware.precision import compute_dtype, set_compute_dtype
from rlcore.models.heads import score_rewards
from rlcore.models.policy import score_sequences
from rlcore.training import learner as learner_module
from rlcore.training.audit import trials
from rlcore.training.audit.slow_path import MAX_TOKENS, SlowPathResult, run_slow_path
from rlcore.training.audit.trials import Trial
from rlcore.training.learner import Learner
from rlcore.training.minibatches import token_sequences
from rlcore.training.optim import LossScale
from tests import strategies
from tests.learners import UNCLIPPED, make_learner, shared_learner, weights_of

ENTROPY = UpdateConfig(optim=UNCLIPPED, entropy_coefficient=0.01)

SETTINGS: dict[str, dict[str, Any]] = {
    **{name: {"name": name} for name in ALGORITHMS},
    **{kind: {"name": "grpo", "kl": KlConfig(coefficient=0.1, estimator=kind)} for kind in KL_LOSSES},
    "ppo_penalty": {"name": "ppo_penalty", "update": dataclasses.replace(ENTROPY, num_epochs=2)},
    "distil": {"name": "distil", "kl": KlConfig(coefficient=1.0, apply_to="reward")},
    "sequence": {
        "name": "grpo",
        "update": dataclasses.replace(ENTROPY, rollout_correction=RolloutCorrectionConfig(level="sequence")),
    },
    "mask": {
        "name": "dapo",
        "update": dataclasses.replace(ENTROPY, rollout_correction=RolloutCorrectionConfig(mode="mask")),
    },
    "huber": {"name": "ppo", "critic": CriticConfig(huber_delta=0.1, clip_range=0.05)},
}


def looked_at(learner: Learner, **settings: Any) -> SlowPathResult:
    samples = strategies.random_samples(3, dtype=learner.policy.dtype)
    reference = strategies.tiny_llama(seed=5, dtype=learner.policy.dtype)
    return run_slow_path(learner, reference, samples, eos_ids=(2,), **({"seed": 1} | settings))


def learner_of(settings: dict[str, Any]) -> Learner:
    learner = make_learner(**({"update": ENTROPY} | settings))
    learner.algorithm = resolve_algorithm(learner.config)
    return learner


@pytest.mark.parametrize("name", SETTINGS)
def test_losses_and_gradients_of_an_update_are_those_of_the_formula(name: str) -> None:
    learner = learner_of(SETTINGS[name])
    found = looked_at(learner)
    names = {"loss/policy", "loss/value"} if learner.critic else {"loss/policy"}
    in_loss = learner.config.kl.coefficient > 0.0 and learner.config.kl.apply_to == "loss"
    measured = {"kl/old", "kl/ref"} if in_loss else {"kl/old"}
    for trial, expected in ((found.trial, names), (found.random_trial, names | measured)):
        assert trial is not None
        assert set(trial.losses) == expected
        for theirs, ours, slack in trial.losses.values():
            assert slack > 0.0
            assert theirs == pytest.approx(ours, abs=1e-6 * max(1.0, abs(ours)))
        modules = [learner.policy, *([learner.critic] if learner.critic else [])]
        assert len(trial.gradients) == sum(len(list(module.parameters())) for module in modules)
        for each in trial.gradients.values():
            assert each.distance <= 1e-5 * each.norm_sum + 1e-9


@pytest.mark.parametrize("detach", [False, True])
def test_a_critic_on_the_policys_backbone_pulls_at_it_as_the_formula_says(detach: bool) -> None:
    critic = CriticConfig(architecture="shared", detach=detach)
    trial = looked_at(shared_learner(critic=critic)).trial
    assert trial is not None
    for each in trial.gradients.values():
        assert each.distance <= 1e-5 * each.norm_sum + 1e-9


def test_log_probabilities_of_policy_and_reference_are_those_of_the_packed_pass() -> None:
    learner = learner_of({"name": "grpo"})
    found, samples = looked_at(learner), strategies.random_samples(3)
    reference = strategies.tiny_llama(seed=5, dtype=torch.float64)
    for model, columns in ((learner.policy, found.logprobs), (reference, found.ref_logprobs)):
        packed = score_sequences(model, token_sequences(samples), tokens_per_microbatch=64)
        for logprobs, places, column in zip(packed, found.positions, columns, strict=True):
            assert torch.allclose(logprobs[list(places)], column, atol=1e-6)


def test_only_tokens_of_the_policy_are_compared_and_of_very_many_some() -> None:
    learner = learner_of({"name": "grpo"})
    samples = strategies.random_samples(3)
    own = [tuple(sample.loss_mask.nonzero()[:, 0].tolist()) for sample in samples]
    assert list(looked_at(learner).positions) == own
    assert max(map(len, own)) <= MAX_TOKENS


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


def test_only_compared_tensors_get_gradients_and_all_learn_again_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    learner = learner_of({"name": "ppo"})
    every = looked_at(learner).trial
    monkeypatch.setattr(trials, "_MAX_NUMBERS", 600)
    trial, had, models = Learner.trial, list[int](), [learner.policy, learner.critic]

    def counted(self: Learner, *given: Any, **more: Any) -> dict[str, float]:
        found = trial(self, *given, **more)
        had.append(sum(p.grad is not None for module in models if module for p in module.parameters()))
        return found

    monkeypatch.setattr(Learner, "trial", counted)
    some = looked_at(learner)
    assert some.trial is not None and some.random_trial is not None and every is not None
    assert had == [len(some.trial.gradients), len(some.random_trial.gradients)]
    assert 0 < had[0] < len(every.gradients)
    for name, each in some.trial.gradients.items():
        assert each.actual == pytest.approx(every.gradients[name].actual)
        assert each.distance <= 1e-5 * each.norm_sum + 1e-9
    assert all(p.requires_grad for module in models if module for p in module.parameters())


def test_a_loss_that_leaves_the_kl_out_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"name": "grpo", "kl": KlConfig(coefficient=0.5)}
    learner = learner_of(settings)
    without = dataclasses.replace(learner._coefficients, kl=0.0)
    monkeypatch.setattr(Learner, "_coefficients", without)
    assert exceeds(looked_at(learner).trial)


def test_a_penalty_that_is_left_out_shows_at_drawn_ratios_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    learner = learner_of(SETTINGS["ppo_penalty"])
    monkeypatch.setattr(Learner, "_coefficients", dataclasses.replace(learner._coefficients, penalty=0.0))
    found = looked_at(learner)
    assert not exceeds(found.trial)
    assert exceeds(found.random_trial)


def exceeds(trial: Trial | None, name: str = "loss/policy") -> bool:
    """True if the losses of a trial are further apart than rounding sets them."""
    assert trial is not None
    theirs, ours, slack = trial.losses[name]
    return abs(theirs - ours) > slack


@pytest.mark.parametrize("name", ["grpo", "dapo", "gspo", "cispo", "rloo", "dppo_tv"])
def test_bounds_that_were_exchanged_or_forgotten_show_at_drawn_ratios_alone(name: str) -> None:
    for change in ({"clip_low": 9.0, "clip_high": 9.0}, {"clip_low": 0.28, "clip_high": 0.2}):
        learner = learner_of({"name": name})
        learner.algorithm = with_constants(learner.algorithm, change)
        found = looked_at(learner)
        assert not exceeds(found.trial)
        drawn = found.random_trial
        assert drawn is not None
        is_seen = exceeds(drawn) or any(each.distance > 0.02 * each.norm_sum for each in drawn.gradients.values())
        assert is_seen or (change["clip_low"] == 0.28 and name != "dapo")


def test_a_step_that_takes_its_own_log_probabilities_for_the_old_ones_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    losses = Learner._losses
    monkeypatch.setattr(Learner, "_losses", lambda self: dataclasses.replace(losses(self), starts_at_one=True))
    found = looked_at(learner_of({"name": "grpo"}))
    assert not exceeds(found.trial)
    assert exceeds(found.random_trial)


def test_a_critic_that_is_not_clipped_shows_and_its_value_beyond_the_end_is_that_of_the_last_state() -> None:
    learner = learner_of({"name": "ppo", "dtype": torch.float32})
    assert learner.critic is not None
    found, samples = looked_at(learner), strategies.random_samples(3)
    sequences = token_sequences(samples)
    scores = score_rewards(learner.critic, sequences, tokens_per_microbatch=64)
    assert list(found.next_values) == pytest.approx(scores.tolist(), abs=1e-5)
    loose = dataclasses.replace(learner.config, critic=CriticConfig(clip_range=0.0))
    clipped, learner.config = learner.config, loose
    without = looked_at(learner).random_trial
    learner.config = clipped
    assert without is not None and found.random_trial is not None
    assert without.losses["loss/value"][0] < found.random_trial.losses["loss/value"][0]


def test_gradients_of_micro_batches_that_were_each_divided_show(monkeypatch: pytest.MonkeyPatch) -> None:
    add = learner_module.add_gradient
    monkeypatch.setattr(learner_module, "add_gradient", lambda loss, **more: add(loss / 3.0, **more))
    trial = looked_at(learner_of({"name": "grpo"})).trial
    assert trial is not None
    assert all(each.distance > 0.1 * each.norm_sum for each in trial.gradients.values() if each.norm_sum > 1e-9)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_trials_of_half_precision_are_float32_and_leave_the_precision_of_the_run(dtype: torch.dtype) -> None:
    learner = learner_of({"name": "ppo", "dtype": torch.float32})
    assert learner.critic is not None
    models = [learner.policy, learner.critic.backbone]
    for model in models:
        set_compute_dtype(model, dtype)
    learner.loss_scale = scale = LossScale(2.0**40, adapts=True)  # the scaled gradient would overflow float16
    samples = strategies.random_samples(3, dtype=torch.float32)
    small = [dataclasses.replace(each, advantages=each.advantages * 1e-5) for each in samples]
    found = run_slow_path(learner, None, small, eos_ids=(2,), seed=1)
    assert learner.loss_scale == scale
    assert [compute_dtype(model) for model in models] == [dtype, dtype]
    for trial in (found.trial, found.random_trial):
        assert trial is not None
        assert trial.gradients
        for each in trial.gradients.values():
            assert each.distance <= 1e-4 * each.norm_sum + 1e-12

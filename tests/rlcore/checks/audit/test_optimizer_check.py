from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from rlcore.checks.audit.optimizer_check import OptimizerChecker, learning_rate_at
from rlcore.config import CriticConfig, OptimConfig, UpdateConfig
from rlcore.training import learner as learner_module
from rlcore.training import optim
from rlcore.training.learner import Learner
from rlcore.training.optim import make_optimizer, make_scheduler
from tests import strategies
from tests.learners import NO_CORRECTION, make_learner, shared_learner

OPTIM = OptimConfig(weight_decay=0.1, warmup_steps=3, schedule="cosine")
UPDATE = UpdateConfig(num_epochs=2, num_minibatches=2, optim=OPTIM, rollout_correction=NO_CORRECTION)


def faults(learner: Learner, updates: int = 1) -> list[str]:
    """Return the checker's findings about some updates, including the construction of the learner."""
    witness, found = OptimizerChecker(learner), list[str]()
    for number in range(updates):
        learner.update(strategies.random_samples(number, dtype=torch.float32), seed=number)
        found += witness.pop_errors()
    return found


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_sound_steps_are_left_alone(name: str) -> None:
    assert faults(make_learner(name, dtype=torch.float32, update=UPDATE, num_iterations=6), updates=6) == []


def test_a_head_on_the_policys_backbone_and_a_critic_that_warms_up_are_left_alone() -> None:
    critic = CriticConfig(architecture="shared", warmup_iterations=12)
    learner = shared_learner(dtype=torch.float32, update=UPDATE, critic=critic, num_iterations=14)
    assert faults(learner, updates=14) == []


def test_an_optimizer_that_climbs_is_found_in_its_first_step() -> None:
    learner = make_learner("grpo", dtype=torch.float32, update=UPDATE)
    for group in learner.optimizer.param_groups:
        group["maximize"] = True
    assert "AdamW at this point of the schedule" in faults(learner)[0]


def test_moments_that_were_forgotten_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(optimizer: torch.optim.Optimizer) -> None:
        optimizer.state.clear()
        optim.take_step(optimizer)

    monkeypatch.setattr(learner_module, "take_step", forgetful)
    found = faults(make_learner("grpo", dtype=torch.float32, update=UPDATE), updates=2)
    assert "are of 0 steps, expected 1" in found[0]


def test_a_rate_that_is_not_the_schedules_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    learner = make_learner("grpo", dtype=torch.float32, update=UPDATE)
    monkeypatch.setattr(learner_module, "set_schedule_step", lambda scheduler, step: None)
    for group in learner.optimizer.param_groups:
        group["lr"] = 0.1
    assert "AdamW at this point of the schedule" in faults(learner)[0]


def test_a_gradient_that_is_not_clipped_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    clip = optim.clip_gradient

    def loose(parameters: Any, *, max_grad_norm: float, scale: float = 1.0) -> float:
        return clip(parameters, max_grad_norm=1e9, scale=scale)

    monkeypatch.setattr(learner_module, "clip_gradient", loose)
    tight = UpdateConfig(optim=OptimConfig(max_grad_norm=1e-3), rollout_correction=NO_CORRECTION)
    assert "the clipping limit is 0.001" in faults(make_learner("grpo", dtype=torch.float32, update=tight))[0]


def test_weights_that_no_optimizer_holds_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def last_alone(groups: Any, config: OptimConfig) -> torch.optim.Optimizer:
        ((module, rate),) = groups
        for path, parameter in module.named_parameters():
            parameter.requires_grad_("layers.1" in path)
        return make_optimizer([(module, rate)], config)

    monkeypatch.setattr(learner_module, "make_optimizer", last_alone)
    (found,) = faults(make_learner("grpo", dtype=torch.float32, update=UPDATE))
    assert "11 of 20 trainable tensors are in no optimizer: model.embed_tokens.weight, " in found


def test_weights_that_get_no_gradient_are_named_after_ten_steps() -> None:
    learner = make_learner("grpo", dtype=torch.float32, update=UPDATE)
    idle = dict(learner.policy.named_parameters())["model.layers.1.mlp.up_proj.weight"]
    idle.register_hook(torch.zeros_like)
    assert faults(learner, updates=2) == []
    learner = make_learner("grpo", dtype=torch.float32, update=UPDATE)
    idle = dict(learner.policy.named_parameters())["model.layers.1.mlp.up_proj.weight"]
    idle.register_hook(torch.zeros_like)
    (found,) = faults(learner, updates=4)
    assert "1 of 20 trainable tensors got no gradient in 10 steps: model.layers.1.mlp.up_proj.weight" in found


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_the_rate_by_formula_is_that_of_the_library(schedule: Any) -> None:
    config = OptimConfig(warmup_steps=3, schedule=schedule)
    optimizer = make_optimizer([(torch.nn.Linear(2, 2), 0.5)], config)
    scheduler = make_scheduler(optimizer, config, num_steps=9)
    for step in range(12):
        optim.set_schedule_step(scheduler, step)
        assert learning_rate_at(config, 0.5, step, num_steps=9) == pytest.approx(optimizer.param_groups[0]["lr"])


def around_steps(monkeypatch: pytest.MonkeyPatch, change: Callable[[Learner, dict[str, torch.Tensor]], None]) -> None:
    """Change weights after each step, by what they were before it."""
    steps = Learner._take_steps

    def take(self: Learner, totals: Any) -> None:
        before = {name: parameter.detach().clone() for name, parameter in self.policy.named_parameters()}
        steps(self, totals)
        with torch.no_grad():
            change(self, before)

    monkeypatch.setattr(Learner, "_take_steps", take)


@pytest.mark.parametrize("word", ["embed_tokens", "model.norm", "layers.0.mlp.down_proj"])
def test_a_tensor_that_stands_still_is_named_whichever_it_is(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def back(learner: Learner, before: dict[str, torch.Tensor]) -> None:
        for name, parameter in learner.policy.named_parameters():
            if word in name:
                parameter.copy_(before[name])

    around_steps(monkeypatch, back)
    learner = make_learner("grpo", dtype=torch.float32, update=UPDATE)
    found = faults(learner, updates=3)
    assert any(word in sentence and "changed outside of optimizer steps" in sentence for sentence in found)


def test_a_rate_that_is_wrong_after_the_first_step_alone_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    seek = optim.set_schedule_step
    monkeypatch.setattr(learner_module, "set_schedule_step", lambda scheduler, step: seek(scheduler, step - step % 4))
    assert "AdamW at this point of the schedule" in faults(make_learner("grpo", dtype=torch.float32, update=UPDATE))[0]


def test_gradients_that_are_zero_everywhere_count_for_no_step() -> None:
    learner = make_learner("ppo", dtype=torch.float32, update=UPDATE)
    assert learner.critic is not None
    for parameter in learner.critic.parameters():
        parameter.register_hook(torch.zeros_like)
    assert faults(learner, updates=4) == []


def test_a_step_that_is_left_out_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    count = [0]

    def take(optimizer: torch.optim.Optimizer) -> None:
        count[0] += 1
        if count[0] % 2:
            optim.take_step(optimizer)

    monkeypatch.setattr(learner_module, "take_step", take)
    found = faults(make_learner("grpo", dtype=torch.float32, update=UPDATE))
    assert "the policy's optimizer took 2 steps since the last update, expected 4" in found

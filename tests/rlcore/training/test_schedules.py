"""A schedule follows the plan of a run: what is skipped counts, and at the end it is where the configuration says."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from rlcore.config import CriticConfig, OptimConfig
from rlcore.training.checkpoint import load_newest, save_checkpoint
from rlcore.training.learner import Learner
from rlcore.types import TrainingSample
from tests import learners, strategies

LINEAR = OptimConfig(max_grad_norm=1e9, schedule="linear")
NUM_ITERATIONS, EPOCHS, MINIBATCHES = 3, 2, 2
NUM_STEPS = NUM_ITERATIONS * EPOCHS * MINIBATCHES
POLICY_RATE, CRITIC_RATE = 1e-3, 1e-2


def make_learner(name: str = "grpo", *, optim: OptimConfig = LINEAR, **settings: Any) -> Learner:
    """Three iterations of two epochs of two minibatches, with a linear schedule to 0."""
    update = {"num_epochs": EPOCHS, "num_minibatches": MINIBATCHES, "optim": optim} | settings.pop("update", {})
    return learners.make_learner(
        name,
        num_iterations=NUM_ITERATIONS,
        learning_rate=POLICY_RATE,
        update=learners.update_config(**update),
        critic=CriticConfig(**({"learning_rate": CRITIC_RATE} | settings.pop("critic", {}))),
        **settings,
    )


def silenced(samples: Sequence[TrainingSample]) -> list[TrainingSample]:
    """The same samples without advantages."""
    return [dataclasses.replace(sample, advantages=torch.zeros_like(sample.advantages)) for sample in samples]


def record_steps(optimizer: torch.optim.Optimizer, rate: float) -> list[int]:
    """The planned step that each of the optimizer's steps is, read from its learning rate; filled as they are taken."""
    places: list[int] = []

    def note(*_: Any) -> None:
        places.append(round((1.0 - optimizer.param_groups[-1]["lr"] / rate) * NUM_STEPS))

    optimizer.register_step_pre_hook(note)
    return places


def run(learner: Learner, iterations: Sequence[Sequence[TrainingSample]]) -> dict[str, float]:
    """Every iteration's update; the metrics of the last."""
    return [dict(learner.update(samples, seed=seed).metrics) for seed, samples in enumerate(iterations)][-1]


def test_steps_without_a_gradient_count_as_planned() -> None:
    learner, samples = make_learner(), strategies.random_samples(0)
    taken = record_steps(learner.optimizer, POLICY_RATE)
    last = run(learner, [silenced(samples), silenced(samples), samples])
    assert taken == [8, 9, 10, 11]
    assert last["learning_rate"] == 0.0


def test_epochs_after_an_early_stop_count_as_planned() -> None:
    learner, samples = make_learner(update={"num_epochs": 2, "early_stop_kl": 1e-9}), strategies.random_samples(0)
    taken = record_steps(learner.optimizer, POLICY_RATE)
    last = run(learner, [samples] * 3)
    assert taken == [0, 1, 4, 5, 8, 9]
    assert last["learning_rate"] == 0.0


def test_minibatches_that_there_are_no_groups_for_count_as_planned() -> None:
    learner, one_group = make_learner(), strategies.random_samples(0, num_prompts=1)
    taken = record_steps(learner.optimizer, POLICY_RATE)
    run(learner, [one_group] * 3)
    assert taken == [0, 2, 4, 6, 8, 10]


def test_while_the_critic_warms_up_both_schedules_go_on() -> None:
    learner, samples = make_learner("ppo", critic={"warmup_iterations": 2}), strategies.random_samples(0)
    critic = record_steps(learner.critic_optimizer, CRITIC_RATE)
    policy = record_steps(learner.optimizer, POLICY_RATE)
    last = run(learner, [samples] * 3)
    assert (critic, policy) == (list(range(12)), [8, 9, 10, 11])
    assert (last["learning_rate"], last["critic/learning_rate"]) == (0.0, 0.0)


def test_while_the_critic_on_the_policys_backbone_warms_up_the_schedule_that_they_share_goes_on() -> None:
    config = CriticConfig(architecture="shared", learning_rate=CRITIC_RATE, warmup_iterations=2)
    update = learners.update_config(num_epochs=EPOCHS, num_minibatches=MINIBATCHES, optim=LINEAR)
    learner = learners.shared_learner(critic=config, update=update, num_iterations=NUM_ITERATIONS)
    steps = record_steps(learner.optimizer, CRITIC_RATE)
    run(learner, [strategies.random_samples(0)] * 3)
    assert steps == list(range(12))


@pytest.mark.parametrize(("schedule", "end"), [("constant", POLICY_RATE), ("linear", 0.0), ("cosine", 0.0)])
def test_a_run_without_any_signal_ends_where_its_schedule_ends(schedule: Any, end: float) -> None:
    learner = make_learner(optim=dataclasses.replace(LINEAR, schedule=schedule, warmup_steps=5))
    last = run(learner, [silenced(strategies.random_samples(0))] * 3)
    assert last["learning_rate"] == pytest.approx(end, abs=1e-12)


def test_a_resumed_run_goes_on_where_the_plan_is(tmp_path: Path) -> None:
    samples = strategies.random_samples(0)
    learner = make_learner()
    run(learner, [samples, silenced(samples)])
    save_checkpoint(tmp_path, 2, learner, run_state={"identity": {}})
    resumed = make_learner()
    load_newest(tmp_path, resumed, identity={})
    taken = record_steps(resumed.optimizer, POLICY_RATE)
    run(resumed, [samples])
    assert taken == [8, 9, 10, 11]

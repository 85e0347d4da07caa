"""Optimizers and schedules: rates step by step, guarded steps, and the plan of a run."""

from __future__ import annotations

import dataclasses
import math
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from rlcore.config import CriticConfig, OptimConfig
from rlcore.errors import ConfigError, NonFiniteError
from rlcore.extras import install_command
from rlcore.models.memory_meter import optimizer_bytes
from rlcore.training.checkpoint import load_newest
from rlcore.training.learner import Learner
from rlcore.training.optim import LossScale, Stepper, clip_gradient, make_optimizer
from rlcore.types import TrainingSample
from tests import learners, strategies
from tests.learners import silenced


class Layer(torch.nn.Linear):
    """A layer that has a precision, as models have."""

    dtype = torch.float32


def stepper(module: torch.nn.Module, rate: float = 0.1, scale: LossScale | None = None, **settings: Any) -> Stepper:
    """Steps of one module, with a loss scale of a run that is under way."""
    made = Stepper(module, [(module, rate)], OptimConfig(), **({"num_steps": 2, "tokens": 9, "setting": ""} | settings))
    made._scale = scale or LossScale()
    return made


def gradient_of(module: torch.nn.Linear, gradient: Callable[[float], list[float]]) -> Callable[[int, float], None]:
    """Work of a step that leaves a gradient, given the loss scale."""

    def accumulate(_: int, scale: float) -> None:
        module.weight.grad = torch.tensor([gradient(scale)])

    return accumulate


def test_only_matrices_decay() -> None:
    first, second = torch.nn.Linear(3, 2), torch.nn.Linear(2, 2)
    second.bias.requires_grad_(False)
    optimizer = make_optimizer([(first, 0.1), (second, 0.2)], OptimConfig(weight_decay=0.5))
    described = [
        ([p.ndim for p in group["params"]], group["lr"], group["weight_decay"]) for group in optimizer.param_groups
    ]
    assert described == [([2], 0.1, 0.5), ([1], 0.1, 0.0), ([2], 0.2, 0.5)]


def steps_of(kind: Literal["adamw", "adamw_8bit"], gradients: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The weights after a step along each gradient, and the bytes of the optimizer's state."""
    module = torch.nn.Linear(128, 64, bias=False)
    torch.nn.init.zeros_(module.weight)
    optimizer = make_optimizer([(module, 0.01)], OptimConfig(kind=kind, weight_decay=0.1))
    for gradient in gradients:
        module.weight.grad = gradient.clone()
        optimizer.step()
    return module.weight.detach(), optimizer_bytes([optimizer])


def test_eight_bit_moments() -> None:
    gradients = torch.randn(10, 64, 128, generator=torch.Generator().manual_seed(0)) + 0.5
    (exact, whole), (rounded, small) = steps_of("adamw", gradients), steps_of("adamw_8bit", gradients)
    # Two bytes a weight instead of eight, two scales for each 256 weights, and two maps of 256 numbers.
    assert small == 2 * 8192 + 2 * 4 * 8192 // 256 + 2 * 4 * 256
    assert whole >= 8 * 8192
    # Ten steps of 0.01 each: moments are rounded to within some per cent.
    assert float((rounded - exact).abs().max()) < 0.02
    assert float((rounded - exact).abs().mean()) < 0.001
    assert not torch.equal(rounded, exact)


def test_missing_bitsandbytes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", None)
    with pytest.raises(ConfigError, match=re.escape(install_command("bnb"))):
        make_optimizer([(torch.nn.Linear(2, 2), 0.1)], OptimConfig(kind="adamw_8bit"))


def test_clip_gradient_by_hand() -> None:
    module = torch.nn.Linear(2, 1, bias=False)
    for scale, expected in ((1.0, [0.6, 0.8]), (0.1, [0.3, 0.4])):
        module.weight.grad = torch.tensor([[3.0, 4.0]]) * scale
        clip_gradient(module.parameters(), max_grad_norm=1.0)
        assert module.weight.grad[0].tolist() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_gradient_takes_no_step(bad: float) -> None:
    module = Layer(2, 1, bias=False)
    steps, before = stepper(module), module.weight.detach().clone()
    with pytest.raises(NonFiniteError, match="gradient norm"):
        steps.take(gradient_of(module, lambda _: [1.0, bad]), [])
    assert torch.equal(module.weight, before)
    assert (module.weight.grad, steps._scheduler.last_epoch) == (None, 0)


def test_loss_scale_changes_no_step() -> None:
    stepped = []
    for scale in (LossScale(), LossScale(1024.0, adapts=True)):
        module = Layer(2, 1, bias=False)
        torch.nn.init.ones_(module.weight)
        _, metrics = stepper(module, scale=scale).take(gradient_of(module, lambda s: [3.0 * s, 4.0 * s]), [])
        assert module.weight.grad is None
        stepped.append((metrics["gradient_norm"], module.weight.tolist()))
    assert stepped[0] == stepped[1]
    assert stepped[0][0] == pytest.approx(5.0)


@pytest.mark.parametrize(
    ("start", "overflows_above", "tried"),
    [
        (LossScale(256.0, 7, adapts=True), 100.0, [256.0, 128.0, 64.0]),
        (LossScale(4.0, adapts=True), 0.0, [4.0, 2.0, 1.0]),
    ],
)
def test_overflow_is_recomputed_with_half_scale(start: LossScale, overflows_above: float, tried: list[float]) -> None:
    module, seen = Layer(2, 1, bias=False), list[float]()

    def gradient(scale: float) -> list[float]:
        seen.append(scale)
        return [1.0, math.inf if scale > overflows_above else scale]

    steps = stepper(module, scale=start)
    with nullcontext() if overflows_above else pytest.raises(NonFiniteError, match="gradient norm"):
        steps.take(gradient_of(module, gradient), [])
        assert steps._scale == LossScale(64.0, 1, adapts=True)
        assert steps._scheduler.last_epoch == 1
    assert seen == tried


LINEAR = OptimConfig(max_grad_norm=1e9, schedule="linear")
NUM_ITERATIONS, EPOCHS, MINIBATCHES = 3, 2, 2
NUM_STEPS = NUM_ITERATIONS * EPOCHS * MINIBATCHES
POLICY_RATE, CRITIC_RATE = 1e-3, 1e-2


def planned_learner(name: str = "grpo", *, optim: OptimConfig = LINEAR, **settings: Any) -> Learner:
    update = {"num_epochs": EPOCHS, "num_minibatches": MINIBATCHES, "optim": optim} | settings.pop("update", {})
    return learners.make_learner(
        name,
        num_iterations=NUM_ITERATIONS,
        learning_rate=POLICY_RATE,
        update=learners.update_config(**update),
        critic=CriticConfig(**({"learning_rate": CRITIC_RATE} | settings.pop("critic", {}))),
        **settings,
    )


def record_steps(optimizer: torch.optim.Optimizer, rate: float) -> list[int]:
    """The planned step that each of the optimizer's steps is, read from its learning rate; filled as they are taken."""
    places: list[int] = []

    def note(*_: Any) -> None:
        places.append(round((1.0 - optimizer.param_groups[-1]["lr"] / rate) * NUM_STEPS))

    optimizer.register_step_pre_hook(note)
    return places


def run_updates(learner: Learner, iterations: Sequence[Sequence[TrainingSample]]) -> dict[str, float]:
    return [dict(learner.update(samples, seed=seed).metrics) for seed, samples in enumerate(iterations)][-1]


SAMPLES = strategies.random_samples(0)
ONE_GROUP = strategies.random_samples(0, num_prompts=1)


@pytest.mark.parametrize(
    ("update", "iterations", "taken"),
    [
        ({}, [silenced(SAMPLES), silenced(SAMPLES), SAMPLES], [8, 9, 10, 11]),  # steps without a gradient count
        ({"early_stop_kl": 1e-9}, [SAMPLES] * 3, [0, 1, 4, 5, 8, 9]),  # epochs after an early stop too
        ({}, [ONE_GROUP] * 3, [0, 2, 4, 6, 8, 10]),  # and missing minibatches
    ],
)
def test_planned_steps_count(update: dict[str, Any], iterations: Any, taken: list[int]) -> None:
    learner = planned_learner(update=update)
    found = record_steps(learner.optimizer, POLICY_RATE)
    last = run_updates(learner, iterations)
    assert found == taken
    assert last["learning_rate"] == 0.0


def test_schedules_advance_during_warmup() -> None:
    learner = planned_learner("ppo", critic={"warmup_iterations": 2})
    critic = record_steps(learner.critic_optimizer, CRITIC_RATE)
    policy = record_steps(learner.optimizer, POLICY_RATE)
    last = run_updates(learner, [SAMPLES] * 3)
    assert (critic, policy) == (list(range(12)), [8, 9, 10, 11])
    assert (last["learning_rate"], last["critic/learning_rate"]) == (0.0, 0.0)


def test_shared_schedule_advances_during_warmup() -> None:
    config = CriticConfig(architecture="shared", learning_rate=CRITIC_RATE, warmup_iterations=2)
    update = learners.update_config(num_epochs=EPOCHS, num_minibatches=MINIBATCHES, optim=LINEAR)
    learner = learners.shared_learner(critic=config, update=update, num_iterations=NUM_ITERATIONS)
    steps = record_steps(learner.optimizer, CRITIC_RATE)
    run_updates(learner, [SAMPLES] * 3)
    assert steps == list(range(12))


@pytest.mark.parametrize(("schedule", "end"), [("constant", POLICY_RATE), ("linear", 0.0), ("cosine", 0.0)])
def test_schedule_ends_without_signal(schedule: Any, end: float) -> None:
    learner = planned_learner(optim=dataclasses.replace(LINEAR, schedule=schedule, warmup_steps=5))
    last = run_updates(learner, [silenced(SAMPLES)] * 3)
    assert last["learning_rate"] == pytest.approx(end, abs=1e-12)


def test_resumed_run_continues_schedule(tmp_path: Path) -> None:
    learner = planned_learner()
    run_updates(learner, [SAMPLES, silenced(SAMPLES)])
    learners.save_checkpoint(tmp_path, 2, learner, run_state={"identity": {}})
    resumed = planned_learner()
    load_newest(tmp_path, resumed, identity={})
    taken = record_steps(resumed.optimizer, POLICY_RATE)
    run_updates(resumed, [SAMPLES])
    assert taken == [8, 9, 10, 11]


@pytest.mark.parametrize(
    ("num_steps", "settings", "expected"),
    [
        (5, {"warmup_steps": 2}, [0.5, 1.0, 1.0, 1.0, 1.0]),
        (6, {"warmup_steps": 2, "schedule": "linear"}, [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]),  # then 1 - done/4
        (4, {"schedule": "cosine"}, [0.5 * (1 + math.cos(math.pi * step / 4)) for step in range(4)]),
    ],
)
def test_schedules_by_hand(num_steps: int, settings: dict[str, Any], expected: list[float]) -> None:
    module = Layer(2, 1)
    steps = Stepper(module, [(module, 1.0)], OptimConfig(**settings), num_steps=num_steps, tokens=9, setting="")
    seen = []
    for _ in range(num_steps):
        seen.append(float(steps.optimizer.param_groups[0]["lr"]))
        steps.take(lambda _, scale: module(torch.ones(1, 2)).sum().mul(scale).backward(), [])
    assert seen == pytest.approx(expected)

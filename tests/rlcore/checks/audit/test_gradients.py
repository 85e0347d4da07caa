from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from rlcore.config import OptimConfig, UpdateConfig
from rlcore.training import learner as learner_module
from rlcore.training import optim
from tests.learners import NO_CORRECTION, make_learner
from tests.rlcore.checks.audit.test_optimizer_check import faults

TIGHT = UpdateConfig(optim=OptimConfig(max_grad_norm=1e-3), rollout_correction=NO_CORRECTION)
LOOSE = UpdateConfig(optim=OptimConfig(max_grad_norm=1e3), rollout_correction=NO_CORRECTION)


@pytest.mark.parametrize("update", [TIGHT, LOOSE])
@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_a_gradient_that_is_clipped_or_whole_is_left_alone(name: str, update: UpdateConfig) -> None:
    assert faults(make_learner(name, dtype=torch.float32, update=update), updates=3) == []


def changed(monkeypatch: pytest.MonkeyPatch, change: Callable[[list[Any]], None], update: UpdateConfig) -> list[str]:
    clip = optim.clip_gradient

    def clipping(parameters: Any, **settings: Any) -> float:
        listed = list(parameters)
        change([parameter for parameter in listed if parameter.grad is not None])
        return clip(listed, **settings)

    monkeypatch.setattr(learner_module, "clip_gradient", clipping)
    return faults(make_learner("grpo", dtype=torch.float32, update=update))


@pytest.mark.parametrize(
    ("factor", "update", "says"),
    [
        (-1.0, LOOSE, "a step has -1 times the gradient of its backward passes"),
        (0.5, LOOSE, "a step has 0.5 times the gradient of its backward passes"),
        (3.0, LOOSE, "a step has 3 times the gradient of its backward passes"),
        (-1.0, TIGHT, "times the gradient of its backward passes"),
    ],
)
def test_a_gradient_that_was_turned_halved_or_raised_is_found(
    factor: float, update: UpdateConfig, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = changed(monkeypatch, lambda them: [each.grad.mul_(factor) for each in them][:0] and None, update)
    assert says in found[0]


@pytest.mark.parametrize("place", [0, 7, -1])
def test_a_single_tensors_gradient_that_was_changed_is_named(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = changed(monkeypatch, lambda them: them[place].grad.mul_(0.5), LOOSE)
    assert "changed between backward pass and step, others did not" in found[0]

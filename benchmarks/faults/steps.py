"""Faults of optimizer steps: gradients, rates, and other changes of weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.faults.lab import Inject, Patches, replaced
from rlcore.training import learner
from rlcore.training.learner import Learner


def gradients(change: Callable[[list[torch.nn.Parameter]], None]) -> Inject:
    """Change the gradient between the loss and the step."""

    def clip(old: Any, parameters: Any, **settings: Any) -> float:
        listed = list(parameters)
        change([parameter for parameter in listed if parameter.grad is not None])
        return float(old(listed, **settings))

    return replaced(learner, "clip_gradient", clip)


def negated(them: list[torch.nn.Parameter]) -> None:
    """Negate the gradient."""
    for parameter in them:
        parameter.grad.neg_()  # type: ignore[union-attr]


def zeroed(them: list[torch.nn.Parameter]) -> None:
    """Zero the gradient."""
    for parameter in them:
        parameter.grad.zero_()  # type: ignore[union-attr]


def first_half_zeroed(them: list[torch.nn.Parameter]) -> None:
    """Zero the gradient of the first half of the tensors."""
    zeroed(them[: len(them) // 2])


def stepping(change: Callable[[torch.optim.Optimizer], None], *, after: bool = False) -> Inject:
    """Change an optimizer before, or weights after, each of its steps."""

    def take(old: Any, optimizer: torch.optim.Optimizer) -> None:
        for work in (old, change) if after else (change, old):
            work(optimizer)

    return replaced(learner, "take_step", take)


def groups(**values: Any) -> Callable[[torch.optim.Optimizer], None]:
    """Change settings of the optimizer."""

    def change(optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            group.update(values)

    return change


def decayed(optimizer: torch.optim.Optimizer) -> None:
    """Decay weights although no decay is set."""
    for group in optimizer.param_groups:
        group["weight_decay"] = 5.0


def forgets_moments(optimizer: torch.optim.Optimizer) -> None:
    """Make each step the first."""
    optimizer.state.clear()


@torch.no_grad()
def disturbed(optimizer: torch.optim.Optimizer) -> None:
    """Perturb all weights slightly at each step."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.add_(1e-3 * torch.ones_like(parameter))


def last_layer_alone(patch: Patches) -> None:
    """Freeze all layers but the last."""

    def make(pairs: Any, config: Any) -> Any:
        for module, _ in pairs:
            for name, parameter in module.named_parameters():
                parameter.requires_grad_("layers.1" in name or "head" in name)
        return old(pairs, config)

    old = patch.set(learner, "make_optimizer", make)


STEPS: dict[str, tuple[str, Inject]] = {
    "the gradient is negated": ("grpo", gradients(negated)),
    "the gradient is zero": ("grpo", gradients(zeroed)),
    "the first half of the weights gets no gradient": ("grpo", gradients(first_half_zeroed)),
    "the gradient is not clipped": (
        "grpo",
        replaced(learner, "clip_gradient", lambda old, *given, **more: old(*given, **more | {"max_grad_norm": 1e9})),
    ),
    "the optimizer climbs": ("grpo", stepping(groups(maximize=True))),
    "the learning rate is ten times as high": ("grpo", stepping(groups(lr=1e-2))),
    "the learning rate is zero": ("grpo", stepping(groups(lr=0.0))),
    "weights decay": ("grpo", stepping(decayed)),
    "the optimizer forgets its moments": ("grpo", stepping(forgets_moments)),
    "weights are disturbed after each step": ("grpo", stepping(disturbed, after=True)),
    "only the last layer learns": ("grpo", last_layer_alone),
    "the schedule stands further on": (
        "grpo, 2 epochs",
        replaced(learner, "set_schedule_step", lambda old, scheduler, step: old(scheduler, step + 40)),
    ),
    "each update is done twice": (
        "grpo",
        replaced(Learner, "update", lambda old, *given, **more: (old(*given, **more), old(*given, **more))[1]),
    ),
    "updates are counted and not done": ("grpo", replaced(Learner, "_step", lambda old, self, samples, totals: totals)),
}

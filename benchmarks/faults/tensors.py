"""Faults of single tensors, and of steps after the first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.faults.lab import Inject, Patches, replaced
from benchmarks.faults.steps import gradients, groups, stepping
from rlcore.training import learner, local_learner
from rlcore.training import optim as optim_module
from rlcore.training.learner import Learner

TWICE = "grpo, 2 epochs"
ADAPTER = "grpo, an adapter"


def named(self: Learner, word: str) -> list[torch.nn.Parameter]:
    """Return the policy's tensors whose names contain a word."""
    return [parameter for name, parameter in self.policy.named_parameters() if word in name]


def around_steps(change: Callable[[Learner, dict[str, torch.Tensor]], None]) -> Inject:
    """Change weights after each step, given their values before it."""

    def take(old: Any, self: Learner, totals: Any) -> None:
        before = {name: parameter.detach().clone() for name, parameter in self.policy.named_parameters()}
        old(self, totals)
        with torch.no_grad():
            change(self, before)

    return replaced(Learner, "_take_steps", take)


def still(word: str) -> Inject:
    """Restore tensors of a name after each step."""
    return slower(word, 0.0)


def slower(word: str, factor: float) -> Inject:
    """Reduce the steps of tensors of a name."""

    def part(self: Learner, before: dict[str, torch.Tensor]) -> None:
        for name, parameter in self.policy.named_parameters():
            if word in name:
                parameter.copy_(before[name] + factor * (parameter - before[name]))

    return around_steps(part)


def rounded(self: Learner, before: dict[str, torch.Tensor]) -> None:
    """Round weights to bfloat16."""
    for parameter in self.policy.parameters():
        parameter.copy_(parameter.bfloat16().float())


def pulled_back(self: Learner, before: dict[str, torch.Tensor]) -> None:
    """Move the first layer back by a hundredth of itself."""
    for parameter in named(self, "layers.0.self_attn.q_proj"):
        parameter.mul_(0.99)


def later_steps(change: Callable[[torch.optim.Optimizer], None]) -> Inject:
    """Change the optimizer in each step of an update but the first."""

    def inject(patch: Patches) -> None:
        count = [0]

        def take(optimizer: torch.optim.Optimizer) -> None:
            count[0] += 1
            if count[0] % 4 != 1:
                change(optimizer)
            old(optimizer)

        old = patch.set(learner, "take_step", take)

    return inject


def doubled(optimizer: torch.optim.Optimizer) -> None:
    """Double the learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = 2.0 * group["lr"]


def optimizer_with(settings: Callable[[Any], dict[str, Any]]) -> Inject:
    """Make optimizers with other settings of all tensors, given the right ones."""

    def make(old: Any, pairs: Any, config: Any) -> Any:
        made = old(pairs, config)
        groups(**settings(config))(made)
        return made

    return replaced(learner, "make_optimizer", make)


def halved(them: list[torch.nn.Parameter]) -> None:
    """Halve the gradient of the first tensor."""
    them[0].grad.mul_(0.5)  # type: ignore[union-attr]


def forgets_one(optimizer: torch.optim.Optimizer) -> None:
    """Reset the moments of the first matrix."""
    optimizer.state.pop(optimizer.param_groups[0]["params"][1], None)


def divided(patch: Patches) -> None:
    """Divide each micro-batch's gradient by their number."""

    def accumulate(self: Learner, *given: Any) -> Any:
        counts: list[int] = []
        pack, add = learner.pack_for, learner.add_gradient

        def packing(*some: Any, **more: Any) -> Any:
            made = pack(*some, **more)
            counts.append(len(made))
            return made

        learner.pack_for = packing  # type: ignore[assignment]
        learner.add_gradient = lambda loss, **more: add(loss / max(1, counts[-1]), **more)  # type: ignore[assignment]
        try:
            return old(self, *given)
        finally:
            learner.pack_for, learner.add_gradient = pack, add

    old = patch.set(Learner, "_accumulate", accumulate)


def clipped_too_early(patch: Patches) -> None:
    """Clip the gradient after each micro-batch, not only at the end."""

    def accumulate(self: Learner, *given: Any) -> Any:
        add = learner.add_gradient

        def adding(loss: Any, **more: Any) -> None:
            add(loss, **more)
            optim_module.clip_gradient(self.policy.parameters(), max_grad_norm=0.05)

        learner.add_gradient = adding  # type: ignore[assignment]
        try:
            return old(self, *given)
        finally:
            learner.add_gradient = add

    old = patch.set(Learner, "_accumulate", accumulate)


def gradient_kept(patch: Patches) -> None:
    """Add a step's gradient to the next one's."""
    kept: dict[int, torch.Tensor] = {}

    def clip(parameters: Any, **settings: Any) -> float:
        listed = list(parameters)
        for parameter in listed:
            if parameter.grad is not None:
                found = parameter.grad.clone()
                parameter.grad.add_(kept.get(id(parameter), torch.zeros_like(found)))
                kept[id(parameter)] = found
        return float(old(listed, **settings))

    old = patch.set(learner, "clip_gradient", clip)


def merged_twice(patch: Patches) -> None:
    """Send the LoRA to the engine at twice its scale."""

    def merged(policy: Any) -> dict[str, torch.Tensor]:
        own, layers = old(policy), dict(policy.base.named_modules())
        bases = {name: getattr(layers.get(name.removesuffix(".weight")), "base_layer", None) for name in own}
        return {name: own[name] if base is None else 2.0 * own[name] - base.weight for name, base in bases.items()}

    old = patch.set(local_learner, "merged_state", merged)


TENSORS: dict[str, tuple[str, Inject]] = {
    "the embeddings stand still": ("grpo, an untied head", still("embed_tokens")),
    "the head stands still": ("grpo, an untied head", still("lm_head")),
    "the norms stand still": ("grpo", still("norm")),
    "the last norm alone stands still": ("grpo", still("model.norm")),
    "one matrix of the first layer stands still": ("grpo", still("layers.0.mlp.up_proj")),
    "the embeddings move by a tenth": ("grpo, an untied head", slower("embed_tokens", 0.1)),
    "the first layer moves by half": ("grpo", slower("layers.0", 0.5)),
    "weights live in bfloat16": ("grpo", around_steps(rounded)),
    "one matrix shrinks beside each step": ("grpo", around_steps(pulled_back)),
    "the rate is doubled after the first step": (TWICE, later_steps(doubled)),
    "nothing moves after the first step": (TWICE, later_steps(groups(lr=0.0))),
    "vectors decay as matrices do": (
        "grpo, weights decay",
        optimizer_with(lambda config: {"weight_decay": config.weight_decay}),
    ),
    "second moments forget too fast": ("grpo", optimizer_with(lambda config: {"betas": (config.beta1, config.beta1)})),
    "the schedule stands still": (TWICE, replaced(learner, "set_schedule_step", lambda old, *given: None)),
    "the schedule moves once an update": (
        TWICE,
        replaced(learner, "set_schedule_step", lambda old, scheduler, step: old(scheduler, step - step % 4)),
    ),
    "the gradient of one tensor is halved": ("grpo", gradients(halved)),
    "the moments of one tensor are forgotten": ("grpo", stepping(forgets_one)),
    "a gradient is divided by the number of micro-batches": ("grpo, small micro-batches", divided),
    "a gradient is clipped before it is whole": ("grpo, small micro-batches", clipped_too_early),
    "a gradient is added to the next": ("grpo", gradient_kept),
    "the engine gets the adapter twice": (ADAPTER, merged_twice),
}

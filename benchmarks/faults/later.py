"""Faults written after the audit was complete, and before it was run on them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.faults.experience import scores, valued
from benchmarks.faults.lab import LEARNS, Inject, Patches, replaced
from benchmarks.faults.losses import inputs, surrogate, weights_of_tokens
from benchmarks.faults.steps import gradients, groups, stepping
from rlcore.algorithms import advantages as advantages_module
from rlcore.rewards.math_answer import MathReward
from rlcore.sampling import native
from rlcore.sampling.native import NativeSampler
from rlcore.training import learner, losses, scoring_models
from rlcore.training.learner import Learner
from rlcore.training.local_learner import LocalLearner
from rlcore.training.losses import StepLosses
from rlcore.types import Score


def every_second_step(patch: Patches) -> None:
    """Skip every second step silently."""
    count = [0]

    def take(optimizer: torch.optim.Optimizer) -> None:
        count[0] += 1
        if count[0] % 2:
            old(optimizer)
        else:
            optimizer.zero_grad(set_to_none=True)

    old = patch.set(learner, "take_step", take)


def reference_of_yesterday(patch: Patches) -> None:
    """Use the policy of the previous update as reference policy."""

    def update(self: LocalLearner, *given: Any, **more: Any) -> Any:
        if self.reference is not None:
            self.reference.load_state_dict(self.learner.policy.state_dict())
        return old(self, *given, **more)

    old = patch.set(LocalLearner, "update", update)


def remembered_by_text(patch: Patches) -> None:
    """Repeat the first score of a text for all prompts."""
    known: dict[str, Score] = {}

    def call(self: Any, rollouts: Any) -> Any:
        found = old(self, rollouts)
        return [known.setdefault(one.text, score) for one, score in zip(rollouts, found, strict=True)]

    old = patch.set(MathReward, "__call__", call)


def averaged(patch: Patches) -> None:
    """Average the weights before and after each update."""

    def update(self: Learner, samples: Any, *, seed: int) -> Any:
        before = [parameter.detach().clone() for parameter in self.policy.parameters()]
        made = old(self, samples, seed=seed)
        with torch.no_grad():
            for parameter, first in zip(self.policy.parameters(), before, strict=True):
                parameter.lerp_(first, 0.5)
        return made

    old = patch.set(Learner, "update", update)


def noisy(them: list[torch.nn.Parameter]) -> None:
    """Add a hundredth of noise to each gradient."""
    for parameter in them:
        parameter.grad.mul_(1.0 + 0.01 * torch.randn_like(parameter.grad))  # type: ignore[union-attr]


def forgets_at_checkpoints(patch: Patches) -> None:
    """Clear the optimizer when a checkpoint is written."""

    def save(self: LocalLearner, *given: Any, **more: Any) -> None:
        old(self, *given, **more)
        self.wait()
        self.learner.optimizer.state.clear()

    old = patch.set(LocalLearner, "save", save)


def first_baseline(patch: Patches) -> None:
    """Compare a group's rewards with the first completion's."""

    def relative(episodes: Any, normalise: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return old(episodes, lambda rewards: normalise(rewards) + (rewards.mean() - rewards[0]))

    old = patch.set(advantages_module, "_by_group", relative)


LATER: dict[str, tuple[str, Inject]] = {
    "later: every second step is left out": (LEARNS, every_second_step),
    "later: the loss reads the state of the token after": (
        "grpo",
        replaced(
            losses,
            "completion_states",
            lambda old, model, batch: old(model, dataclasses.replace(batch, predictors=batch.predictors + 1)),
        ),
    ),
    "later: the gradient ends before the backbone": (
        "grpo, an untied head",
        replaced(losses, "completion_states", lambda old, *given: old(*given).detach().requires_grad_()),
    ),
    "later: samples with a negative advantage are left out": (
        LEARNS,
        replaced(
            StepLosses, "has_gradient", lambda old, self, one: old(self, one) and float(one.advantages.sum()) >= 0.0
        ),
    ),
    "later: the reference is the policy of the update before": ("grpo, KL in the loss", reference_of_yesterday),
    "later: the verifier remembers texts, and not prompts": ("grpo", remembered_by_text),
    "later: completions end at half of the limit": (
        "grpo",
        replaced(
            NativeSampler,
            "sample",
            lambda old, self, prompts, params, **more: old(
                self, prompts, dataclasses.replace(params, max_new_tokens=params.max_new_tokens // 2), **more
            ),
        ),
    ),
    "later: the engine draws and reports at 0.98 of the temperature": (
        "grpo",
        replaced(native, "sample_tokens", lambda old, *given, temperature: old(*given, temperature=0.98 * temperature)),
    ),
    "later: the engine sees a prompt's first token twice": (
        "grpo",
        replaced(
            native,
            "decode",
            lambda old, model, prompts, *rest, **more: old(model, [(ids[0], *ids) for ids in prompts], *rest, **more),
        ),
    ),
    "later: weights are averaged after each update": (LEARNS, averaged),
    "later: a hundredth of noise in every gradient": (LEARNS, gradients(noisy)),
    "later: checkpoints empty the optimizer": (LEARNS, forgets_at_checkpoints),
    "later: a group's baseline is its first completion": (LEARNS, first_baseline),
    "later: values are halved": (
        "ppo",
        replaced(
            scoring_models, "score_values", lambda old, *given, **more: [0.5 * each for each in old(*given, **more)]
        ),
    ),
    "later: gradients of the step before are kept": (
        "grpo, 2 epochs",
        replaced(learner, "zero_grad", lambda old, *models: None),
    ),
    "later: rewards above 0.5 count 0.5": ("grpo", scores(valued(lambda value: min(value, 0.5)))),
    "later: rewards have a hundredth of noise": (
        LEARNS,
        scores(valued(lambda value: value + 0.01 * float(torch.randn(())))),
    ),
    "later: tokens after the eighth count nothing": (
        "grpo",
        weights_of_tokens(lambda weights: torch.cat([weights[:8], torch.zeros_like(weights[8:])])),
    ),
    "later: advantages within 1 alone": ("grpo", inputs(advantages=lambda value: value.clamp(-1.0, 1.0))),
    "later: Adam's epsilon is 0.001": (LEARNS, stepping(groups(eps=1e-3))),
    "later: the loss has a penalty on log-probabilities": (
        LEARNS,
        surrogate(lambda loss, logprobs: loss + 1e-3 * logprobs.sum()),
    ),
    "later: first moments have momentum 0.95": (LEARNS, stepping(groups(betas=(0.95, 0.95)))),
}

"""Faults of the losses: inputs, terms, weights, and scoring models."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.faults.lab import Inject, Patches, replaced
from rlcore.algorithms import kl as kl_module
from rlcore.algorithms import objective
from rlcore.distributed import build
from rlcore.models import policy as policy_module
from rlcore.models import tree_attention
from rlcore.training import learner, losses, minibatches, scoring_models
from rlcore.training.learner import Learner


def inputs(**turns: Callable[[Any], Any]) -> Inject:
    """Change the inputs of the policy's loss."""

    def made(old: Any, given: Any, *rest: Any) -> Any:
        return old(dataclasses.replace(given, **{n: turn(getattr(given, n)) for n, turn in turns.items()}), *rest)

    return replaced(losses, "policy_loss", made)


def coefficients(**values: Any) -> Inject:
    """Change the coefficients of the loss's terms."""

    def inject(patch: Patches) -> None:
        made = Learner.__dict__["_coefficients"].fget
        patch.set(Learner, "_coefficients", property(lambda self: dataclasses.replace(made(self), **values)))

    return inject


def weights_of_tokens(change: Callable[[torch.Tensor], torch.Tensor]) -> Inject:
    """Change the weight of each token."""
    return replaced(learner, "token_weights", lambda old, *given: [change(each) for each in old(*given)])


def temperature_ignored(patch: Patches) -> None:
    """Score at temperature 1 in trainer and canary, whatever is requested."""
    for name in ("state_logprobs", "state_scores"):
        old = getattr(policy_module, name)
        patch.set(policy_module, name, lambda *given, _old=old, temperature=1.0, **more: _old(*given, **more))


def visible_neighbours(patch: Patches) -> None:
    """Let the completions of one row attend to each other."""

    def layout(segment: torch.Tensor) -> Any:
        return old(segment.masked_fill(segment > 0, 1))

    old = patch.set(tree_attention, "layout_of", layout)
    patch.set(policy_module, "layout_of", layout)


def reference_learns(patch: Patches) -> None:
    """Use the policy's current weights as reference policy."""

    def others(plan: Any, policy: Any, runtime: Any) -> Any:
        critic, reference = old(plan, policy, runtime)
        return critic, policy if reference is not None else None

    old = patch.set(build, "_critic_and_reference", others)


def kl_turned(patch: Patches) -> None:
    """Negate the KL loss."""
    losses_of = dict(kl_module.KL_LOSSES)
    patch.set(objective, "KL_LOSSES", {n: (lambda d, r, f=f: -f(d, r)) for n, f in losses_of.items()})


def surrogate(change: Callable[[Any, torch.Tensor], Any]) -> Inject:
    """Change the surrogate of each token."""
    return replaced(
        losses.PolicyTerms,
        "__call__",
        lambda old, self, at, logprobs, *rest: change(old(self, at, logprobs, *rest), logprobs),
    )


LOSSES: dict[str, tuple[str, Inject]] = {
    "the loss climbs": ("grpo", surrogate(lambda loss, _: -loss)),
    "the loss is halved": ("grpo", surrogate(lambda loss, _: 0.5 * loss)),
    "the loss forgets advantages": ("grpo", inputs(advantages=torch.ones_like)),
    "advantages negated within the loss": ("grpo", inputs(advantages=lambda value: -value)),
    "advantages of the sequences before, within the loss": (
        "grpo",
        replaced(
            minibatches.Columns,
            "get",
            lambda old, self, name: old(self, name).roll(1) if name == "advantages" else old(self, name),
        ),
    ),
    "the loss forgets the mask": ("grpo, a calculator", inputs(loss_mask=torch.ones_like)),
    "the loss has a bonus for entropy that nobody asked for": ("grpo", coefficients(entropy=0.05)),
    "the KL is left out of the loss": ("grpo, KL in the loss", coefficients(kl=0.0)),
    "the KL is ten times as strong": ("grpo, KL in the loss", coefficients(kl=1.0)),
    "the KL's sign is turned": ("grpo, KL in the loss", kl_turned),
    "tokens weigh twice as much": ("grpo", weights_of_tokens(lambda weights: 2.0 * weights)),
    "all tokens weigh the same, not all sequences": (
        "grpo",
        weights_of_tokens(lambda weights: torch.where(weights > 0, 0.01, 0.0)),
    ),
    "micro-batches after the first are lost": (
        "grpo, small micro-batches",
        replaced(learner, "pack_for", lambda old, *given, **more: old(*given, **more)[:1]),
    ),
    "completions in a row see each other": ("grpo", visible_neighbours),
    "the trainer scores at temperature 1": ("grpo, temperature 0.7", temperature_ignored),
    "the reference learns along": ("grpo, KL in the loss", reference_learns),
    "the critic learns nothing": ("ppo", replaced(losses, "critic_loss", lambda old, *given: 0.0 * old(*given))),
    "the critic learns another token's values": (
        "ppo",
        replaced(losses, "critic_loss", lambda old, columns, values, *rest: old(columns, values.roll(1), *rest)),
    ),
    "the critic's values are those of the token before": (
        "ppo",
        replaced(
            scoring_models, "score_values", lambda old, *given, **more: [each.roll(1) for each in old(*given, **more)]
        ),
    ),
}

"""Faults of the losses: inputs, terms, weights, and scoring models."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.faults.lab import Inject, Patches
from rlcore.algorithms import kl as kl_module
from rlcore.algorithms import objective
from rlcore.distributed import build
from rlcore.models import policy as policy_module
from rlcore.models import tree_attention
from rlcore.training import learner, losses, minibatches, scoring_models
from rlcore.training.learner import Learner


def inputs(**turns: Callable[[Any], Any]) -> Inject:
    """Change the inputs of the policy's loss."""

    def inject(patch: Patches) -> None:
        def made(given: Any, *rest: Any) -> Any:
            return old(dataclasses.replace(given, **{n: turn(getattr(given, n)) for n, turn in turns.items()}), *rest)

        old = objective.policy_loss
        patch.set(losses, "policy_loss", made)

    return inject


def coefficients(**values: Any) -> Inject:
    """Change the coefficients of the loss's terms."""

    def inject(patch: Patches) -> None:
        made = Learner.__dict__["_coefficients"].fget
        patch.set(Learner, "_coefficients", property(lambda self: dataclasses.replace(made(self), **values)))

    return inject


def weights_of_tokens(change: Callable[[torch.Tensor], torch.Tensor]) -> Inject:
    """Change the weight of each token."""

    def inject(patch: Patches) -> None:
        old = patch.set(learner, "token_weights", lambda *given: [change(each) for each in old(*given)])

    return inject


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


def critic_idle(patch: Patches) -> None:
    """Remove the gradient of the critic's loss."""
    old = patch.set(losses, "critic_loss", lambda *given: 0.0 * old(*given))


def critic_wrong(patch: Patches) -> None:
    """Shift the values of the critic's loss by one token."""

    def loss(columns: Any, predicted: torch.Tensor, *rest: Any) -> torch.Tensor:
        return old(columns, predicted.roll(1), *rest)

    old = patch.set(losses, "critic_loss", loss)


def values_shifted(patch: Patches) -> None:
    """Shift each value by one token."""
    old = patch.set(
        scoring_models, "score_values", lambda *given, **more: [each.roll(1) for each in old(*given, **more)]
    )


def kl_turned(patch: Patches) -> None:
    """Negate the KL loss."""
    losses_of = dict(kl_module.KL_LOSSES)
    patch.set(objective, "KL_LOSSES", {n: (lambda d, r, f=f: -f(d, r)) for n, f in losses_of.items()})


def surrogate(change: Callable[[Any, torch.Tensor], Any]) -> Inject:
    """Change the surrogate of each token."""

    def inject(patch: Patches) -> None:
        def call(
            self: losses.PolicyTerms, places: slice, logprobs: torch.Tensor, entropy: torch.Tensor
        ) -> torch.Tensor:
            return change(old(self, places, logprobs, entropy), logprobs)

        old = patch.set(losses.PolicyTerms, "__call__", call)

    return inject


def microbatches_lost(patch: Patches) -> None:
    """Drop all but the first micro-batch."""
    old = patch.set(learner, "pack_for", lambda *given, **more: old(*given, **more)[:1])


def columns_moved(patch: Patches) -> None:
    """Use the fields of the previous sequences in a micro-batch."""

    def get(self: minibatches.Columns, name: str) -> torch.Tensor:
        found = old(self, name)
        return found.roll(1) if name == "advantages" else found

    old = patch.set(minibatches.Columns, "get", get)


LOSSES: dict[str, tuple[str, Inject]] = {
    "the loss climbs": ("grpo", surrogate(lambda loss, _: -loss)),
    "the loss is halved": ("grpo", surrogate(lambda loss, _: 0.5 * loss)),
    "the loss forgets advantages": ("grpo", inputs(advantages=torch.ones_like)),
    "advantages negated within the loss": ("grpo", inputs(advantages=lambda value: -value)),
    "advantages of the sequences before, within the loss": ("grpo", columns_moved),
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
    "micro-batches after the first are lost": ("grpo, small micro-batches", microbatches_lost),
    "completions in a row see each other": ("grpo", visible_neighbours),
    "the trainer scores at temperature 1": ("grpo, temperature 0.7", temperature_ignored),
    "the reference learns along": ("grpo, KL in the loss", reference_learns),
    "the critic learns nothing": ("ppo", critic_idle),
    "the critic learns another token's values": ("ppo", critic_wrong),
    "the critic's values are those of the token before": ("ppo", values_shifted),
}

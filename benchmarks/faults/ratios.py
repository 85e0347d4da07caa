"""Faults of the losses that show only if the ratio is not 1, in values beyond an end, or in a gradient."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import torch

from benchmarks.faults.experience import each, samples
from benchmarks.faults.lab import Inject, Patches, replaced
from benchmarks.faults.losses import inputs
from rlcore.algorithms import advantages as advantages_module
from rlcore.algorithms import kl as kl_module
from rlcore.algorithms import objective
from rlcore.algorithms.ratios import completion_ratio
from rlcore.algorithms.surrogates import Surrogate
from rlcore.models.heads import ScalarHeadModel
from rlcore.training import local_learner, losses, scoring_models
from rlcore.training.learner import Learner
from rlcore.types import TrainingSample

TWICE = "dapo, 2 epochs"
CUT = "ppo, values beyond the end"


def algorithm(**changes: Callable[[Any], Any]) -> Inject:
    """Change the ratio or surrogate of the algorithm's loss."""

    def made(old: Any, given: Any, row: Any, *rest: Any) -> Any:
        changed = {name: turn(getattr(row, name)) for name, turn in changes.items()}
        return old(given, dataclasses.replace(row, **changed), *rest)

    return replaced(losses, "policy_loss", made)


def surrogate(change: Callable[..., Surrogate]) -> Inject:
    """Change the surrogate, given the right one, log-ratios, logprobs and advantages."""
    return algorithm(surrogate=lambda right: lambda *given: change(right, *given))


def unclipped(right: Any, log_ratio: torch.Tensor, logprobs: torch.Tensor, advantages: torch.Tensor) -> Surrogate:
    """Do not clip the ratio."""
    return dataclasses.replace(right(log_ratio, logprobs, advantages), loss=-log_ratio.exp() * advantages)


def bounds_exchanged(
    right: Any, log_ratio: torch.Tensor, logprobs: torch.Tensor, advantages: torch.Tensor
) -> Surrogate:
    """Exchange the clip bounds."""
    low, high = right.keywords["clip_low"], right.keywords["clip_high"]
    return right.func(log_ratio, logprobs, advantages, clip_low=high, clip_high=low)


def always_cut(right: Any, log_ratio: torch.Tensor, logprobs: torch.Tensor, advantages: torch.Tensor) -> Surrogate:
    """Clip the ratio for every advantage."""
    cut = log_ratio.exp().clamp(0.8, 1.28)
    return dataclasses.replace(right(log_ratio, logprobs, advantages), loss=-cut * advantages)


def turned_ratio(right: Any, log_ratio: torch.Tensor, logprobs: torch.Tensor, advantages: torch.Tensor) -> Surrogate:
    """Compute old over new, with the gradient of new over old."""
    return cast(Surrogate, right(-log_ratio + 2.0 * (log_ratio - log_ratio.detach()), logprobs, advantages))


def forward_kl(patch: Patches) -> None:
    """Estimate the KL without its ratio: the same value at first, another gradient."""
    patch.set(objective, "KL_LOSSES", {**kl_module.KL_LOSSES, "k3_ratio": kl_module.k3_plain_loss})


def next_values(change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Inject:
    """Change the values beyond the ends, given these and the last values of all completions."""

    def passes(old: Any, self: Any, sequences: Any, **more: Any) -> Any:
        made = old(self, sequences, **more)
        lasts = torch.stack([each[-1] for each in made.values])
        return dataclasses.replace(made, next_values=change(made.next_values, lasts))

    return replaced(scoring_models.ScoringModels, "passes", passes)


def whitened_by_sample(them: list[TrainingSample]) -> list[TrainingSample]:
    """Normalize to mean 0 and variance 1 within each completion."""
    return [
        dataclasses.replace(
            one, advantages=(one.advantages - one.advantages.mean()) / (one.advantages.std(unbiased=False) + 1e-6)
        )
        for one in them
    ]


RATIOS: dict[str, tuple[str, Inject]] = {
    "the ratio is not clipped": (TWICE, surrogate(unclipped)),
    "the bounds of the ratio are exchanged": (TWICE, surrogate(bounds_exchanged)),
    "the ratio is cut for each advantage": (TWICE, surrogate(always_cut)),
    "the ratio is turned round": (TWICE, surrogate(turned_ratio)),
    "the ratio is 1 in each step": (
        TWICE,
        replaced(Learner, "_losses", lambda old, self: dataclasses.replace(old(self), starts_at_one=True)),
    ),
    "a sequence's ratio is the product": ("gspo, 2 epochs", algorithm(ratio=lambda _: completion_ratio)),
    "advantages are halved where the ratio is not 1": (
        TWICE,
        surrogate(
            lambda right, ratio, logprobs, advantages: right(
                ratio, logprobs, torch.where(ratio != 0, 0.5, 1.0) * advantages
            )
        ),
    ),
    "the KL's gradient is that of the other direction": ("grpo, KL in the loss", forward_kl),
    "the bonus for entropy has the wrong sign": ("grpo, entropy in the loss", inputs(entropy=torch.neg)),
    "the correction of the engine is turned round": (
        "grpo, one iteration ahead",
        replaced(
            objective,
            "mismatch_correction",
            lambda old, given, config: old(
                dataclasses.replace(given, old_logprobs=given.sampler_logprobs, sampler_logprobs=given.old_logprobs),
                config,
            ),
        ),
    ),
    "the critic's values are not clipped": (
        "ppo",
        replaced(losses, "value_loss", lambda old, *given, **more: old(*given, **more | {"clip_range": 0.0})),
    ),
    "states are dropped out while the policy learns": (
        "grpo",
        replaced(losses, "completion_states", lambda old, *given: torch.nn.functional.dropout(old(*given), 0.1)),
    ),
    "no value beyond the end of what was cut": (CUT, next_values(lambda found, _: torch.zeros_like(found))),
    "a value beyond the end of each completion": (
        CUT,
        next_values(lambda found, lasts: torch.where(found == 0, lasts, found)),
    ),
    "the value beyond the end has the wrong sign": (CUT, next_values(lambda found, _: -found)),
    "advantages of ppo negated, with values beyond the end": (CUT, samples(each(advantages=torch.neg))),
    "returns of ppo are zero, with values beyond the end": (CUT, samples(each(returns=torch.zeros_like))),
    "lambda is 1, with values beyond the end": (
        CUT,
        replaced(advantages_module, "gae", lambda old, episodes, *, gamma, lam: old(episodes, gamma=gamma, lam=1.0)),
    ),
    "advantages of ppo whitened by completion, with values beyond the end": (CUT, samples(whitened_by_sample)),
    "the critic's backbone stands still": (
        "ppo",
        replaced(ScalarHeadModel, "state_values", lambda old, self, given: old(self, given.detach())),
    ),
    "the coefficient of the KL does not adapt": (
        "grpo, the KL adapts",
        replaced(local_learner.LocalLearner, "observe_kl", lambda old, *given: None),
    ),
}

"""Faults of the losses that show only if the ratio is not 1, in values beyond an end, or in a gradient."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import torch

from benchmarks.faults.experience import each, samples
from benchmarks.faults.lab import Inject, Patches
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

    def inject(patch: Patches) -> None:
        def made(given: Any, row: Any, *rest: Any) -> Any:
            return old(
                given, dataclasses.replace(row, **{n: turn(getattr(row, n)) for n, turn in changes.items()}), *rest
            )

        old = objective.policy_loss
        patch.set(losses, "policy_loss", made)

    return inject


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


def always_at_one(patch: Patches) -> None:
    """Use each step's own logprobs as the old ones."""
    old = Learner._losses
    patch.set(Learner, "_losses", lambda self: dataclasses.replace(old(self), starts_at_one=True))


def forward_kl(patch: Patches) -> None:
    """Estimate the KL without its ratio: the same value at first, another gradient."""
    patch.set(objective, "KL_LOSSES", {**kl_module.KL_LOSSES, "k3_ratio": kl_module.k3_plain_loss})


def correction_turned(patch: Patches) -> None:
    """Compute the engine's probability over the trainer's."""

    def turned(given: Any, config: Any) -> Any:
        return old(
            dataclasses.replace(given, old_logprobs=given.sampler_logprobs, sampler_logprobs=given.old_logprobs), config
        )

    old = patch.set(objective, "mismatch_correction", turned)


def value_clip_lost(patch: Patches) -> None:
    """Do not clip the critic's values."""
    old = patch.set(losses, "value_loss", lambda *given, clip_range, **more: old(*given, clip_range=0.0, **more))


def dropped_out(patch: Patches) -> None:
    """Drop a tenth of the states during training."""
    old = patch.set(losses, "completion_states", lambda *given: torch.nn.functional.dropout(old(*given), 0.1))


def next_values(change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Inject:
    """Change the values beyond the ends, given these and the last values of all completions."""

    def inject(patch: Patches) -> None:
        def passes(self: Any, sequences: Any, **more: Any) -> Any:
            made = old(self, sequences, **more)
            lasts = torch.stack([each[-1] for each in made.values])
            return dataclasses.replace(made, next_values=change(made.next_values, lasts))

        old = patch.set(scoring_models.ScoringModels, "passes", passes)

    return inject


def lam_of_one(patch: Patches) -> None:
    """Use lambda 1, whatever is requested."""
    old = patch.set(advantages_module, "gae", lambda episodes, *, gamma, lam: old(episodes, gamma=gamma, lam=1.0))


def frozen_backbone(patch: Patches) -> None:
    """The critic's head alone gets a gradient."""
    states = patch.set(ScalarHeadModel, "state_values", lambda self, given: states(self, given.detach()))


def controller_idle(patch: Patches) -> None:
    """Keep the KL coefficient constant."""
    patch.set(local_learner.LocalLearner, "observe_kl", lambda self, mean_kl, num_samples: None)


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
    "the ratio is 1 in each step": (TWICE, always_at_one),
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
    "the correction of the engine is turned round": ("grpo, one iteration ahead", correction_turned),
    "the critic's values are not clipped": ("ppo", value_clip_lost),
    "states are dropped out while the policy learns": ("grpo", dropped_out),
    "no value beyond the end of what was cut": (CUT, next_values(lambda found, _: torch.zeros_like(found))),
    "a value beyond the end of each completion": (
        CUT,
        next_values(lambda found, lasts: torch.where(found == 0, lasts, found)),
    ),
    "the value beyond the end has the wrong sign": (CUT, next_values(lambda found, _: -found)),
    "advantages of ppo negated, with values beyond the end": (CUT, samples(each(advantages=torch.neg))),
    "returns of ppo are zero, with values beyond the end": (CUT, samples(each(returns=torch.zeros_like))),
    "lambda is 1, with values beyond the end": (CUT, lam_of_one),
    "advantages of ppo whitened by completion, with values beyond the end": (CUT, samples(whitened_by_sample)),
    "the critic's backbone stands still": ("ppo", frozen_backbone),
    "the coefficient of the KL does not adapt": ("grpo, the KL adapts", controller_idle),
}

"""The one formula: ``loss = sum of weight * (surrogate + beta * KL - c_H * entropy)`` over the tokens of a micro-batch.

The weights already hold the normalisation over the whole optimizer step, so the losses of micro-batches add up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlcore.algorithms.kl import KL_LOSSES, k3
from rlcore.algorithms.ratios import clamped_difference, sequence_mean
from rlcore.algorithms.table import Algorithm
from rlcore.config import RolloutCorrectionConfig

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int, Shaped


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LossInputs:
    """One micro-batch of N completion tokens; every tensor is [N], float32 unless said otherwise.

    ``policy_logprobs`` and ``entropy`` carry the gradient. ``loss_mask``: bool. ``weights``: of the whole step.
    ``sequence_index``: int64. ``ref_logprobs`` is read only where the KL coefficient is positive.
    """

    policy_logprobs: Float[Tensor, "tokens"]
    entropy: Float[Tensor, "tokens"]
    old_logprobs: Float[Tensor, "tokens"]
    sampler_logprobs: Float[Tensor, "tokens"]
    ref_logprobs: Float[Tensor, "tokens"]
    advantages: Float[Tensor, "tokens"]
    weights: Float[Tensor, "tokens"]
    loss_mask: Bool[Tensor, "tokens"]
    sequence_index: Int[Tensor, "tokens"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Coefficients:
    """What the terms beside the surrogate count. ``kl`` 0 or ``entropy`` 0: the term is off."""

    kl: float
    kl_estimator: str
    entropy: float
    mismatch: RolloutCorrectionConfig


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LossOutput:
    """``loss``: scalar with gradient. ``sums``: detached sums over the micro-batch's unmasked tokens, by metric;
    ``maxima``: detached maxima. ``num_tokens``: unmasked tokens, int64 scalar."""

    loss: Float[Tensor, ""]
    sums: Mapping[str, Shaped[Tensor, ""]]
    maxima: Mapping[str, Float[Tensor, ""]]
    num_tokens: Int[Tensor, ""]


def policy_loss(inputs: LossInputs, algorithm: Algorithm, coefficients: Coefficients) -> LossOutput:
    """The loss of one micro-batch and what is worth knowing about it.

    Masked tokens are filled before any arithmetic: 0 * NaN is NaN, so a mask that multiplies protects nothing.
    """
    mask = inputs.loss_mask
    log_ratio = clamped_difference(inputs.policy_logprobs, inputs.old_logprobs, mask)
    logprobs = inputs.policy_logprobs.masked_fill(~mask, 0.0)
    advantages = inputs.advantages.masked_fill(~mask, 0.0)
    ratio = algorithm.ratio(log_ratio, inputs.sequence_index, mask)
    surrogate = algorithm.surrogate(ratio, logprobs, advantages)

    correction, mismatch_sums, mismatch_maxima = mismatch_correction(inputs, coefficients.mismatch)
    token_loss = surrogate.loss
    d = torch.zeros_like(log_ratio)
    if coefficients.kl > 0.0:
        d = clamped_difference(inputs.policy_logprobs, inputs.ref_logprobs, mask)
        token_loss = token_loss + coefficients.kl * KL_LOSSES[coefficients.kl_estimator](d, log_ratio)
    entropy = inputs.entropy.masked_fill(~mask, 0.0)
    if coefficients.entropy > 0.0:
        token_loss = token_loss - coefficients.entropy * entropy
    weights = inputs.weights.masked_fill(~mask, 0.0) * correction
    with torch.no_grad():
        sums = {
            "kl/old": k3(-log_ratio).sum(),
            "clip/low": (surrogate.clipped_low & mask).sum(),
            "clip/high": (surrogate.clipped_high & mask).sum(),
            "entropy": entropy.sum(),
            **mismatch_sums,
        }
        if coefficients.kl > 0.0:
            sums["kl/ref"] = k3(d).sum()
    return LossOutput(loss=(weights * token_loss).sum(), sums=sums, maxima=mismatch_maxima, num_tokens=mask.sum())


@torch.no_grad()
def mismatch_correction(
    inputs: LossInputs, config: RolloutCorrectionConfig
) -> tuple[Float[Tensor, "tokens"], dict[str, Shaped[Tensor, ""]], dict[str, Float[Tensor, ""]]]:
    """Detached weights [N] for the engine's log-probabilities differing from the trainer's for the same weights.

    ``w = exp(old_logprobs - sampler_logprobs)`` per token, or the geometric mean over the sequence (never the
    product, which shrinks the update with length); truncated at ``upper``, or 0 outside [``low``, ``upper``]. Rejected
    tokens stay in the denominator, since the weights of the step were normalised before.
    """
    mask = inputs.loss_mask
    difference = clamped_difference(inputs.old_logprobs, inputs.sampler_logprobs, mask)
    log_weight = difference
    if config.level == "sequence":
        log_weight = sequence_mean(difference, inputs.sequence_index, mask)[inputs.sequence_index]
    raw = log_weight.exp()
    correction = torch.ones_like(raw)
    rejected = torch.zeros_like(mask)
    if config.mode == "truncate":
        correction = raw.clamp(max=config.upper)
    elif config.mode == "mask":
        rejected = ((raw < config.low) | (raw > config.upper)) & mask
        correction = raw.masked_fill(rejected, 0.0)
    kept = raw.masked_fill(~mask, 0.0)
    sums = {
        "mismatch/mean_abs": difference.abs().sum(),
        "mismatch/kl": k3(-difference).sum(),  # KL(sampler || trainer): the tokens were drawn from the sampler
        "mismatch/rejected": rejected.sum(),
        "mismatch/weight": kept.sum(),
        "mismatch/weight_squared": kept.square().sum(),
    }
    maxima = {"mismatch/max_abs": difference.abs().max() if len(difference) else difference.sum()}
    return correction, sums, maxima

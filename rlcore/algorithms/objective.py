"""Losses of policy and critic: weighted sums of ``surrogate + beta * KL - c_H * entropy`` and of value losses.

KL is to the reference policy, and for rows with a penalty also from the old policy, each with its beta.

The weights are normalized over the whole optimizer step, so the losses of micro-batches add up. The critic's loss per
token gets the same weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlcore.algorithms.kl import KL_LOSSES, k3
from rlcore.algorithms.surrogates import clamped_difference, sequence_mean
from rlcore.algorithms.table import Algorithm
from rlcore.config import RolloutCorrectionConfig

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int, Shaped


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LossInputs:
    """A micro-batch of N completion tokens. Every tensor is [N], and float32 unless noted.

    Attributes:
        policy_logprobs: Carries the gradient, as does ``entropy``.
        ref_logprobs: Read only if the KL coefficient is positive.
        weights: Normalized over the whole optimizer step.
        loss_mask: bool.
        sequence_index: int64.
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
    """Coefficients of the loss terms besides the surrogate; 0 turns a term off. ``penalty``: of KL(old || policy)."""

    kl: float
    kl_estimator: str
    entropy: float
    mismatch: RolloutCorrectionConfig
    penalty: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LossOutput:
    """Loss of a micro-batch and its statistics.

    Attributes:
        loss: Scalar with gradient.
        sums: Detached sums over the unmasked tokens, by metric.
        maxima: Detached maxima, by metric.
        num_tokens: Number of unmasked tokens, int64 scalar.
    """

    loss: Float[Tensor, ""]
    sums: Mapping[str, Shaped[Tensor, ""]]
    maxima: Mapping[str, Float[Tensor, ""]]
    num_tokens: Int[Tensor, ""]


def policy_loss(inputs: LossInputs, algorithm: Algorithm, coefficients: Coefficients) -> LossOutput:
    """Return the loss and statistics of one micro-batch.

    Masked tokens are filled before any arithmetic, because 0 * NaN is NaN.
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
    if coefficients.penalty > 0.0:
        token_loss = token_loss + coefficients.penalty * k3(-log_ratio)
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
    """Return detached weights [N] that correct engine log-probabilities that differ at equal weights, with statistics.

    ``w = exp(old_logprobs - sampler_logprobs)`` per token, or its geometric mean over the sequence. A product would
    shrink the update with length. ``w`` is truncated at ``upper``, or set to 0 outside [``low``, ``upper``]. Rejected
    tokens stay in the denominator, because the weights of the step are normalized before.
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


def value_loss(
    values: Float[Tensor, "tokens"],
    old_values: Float[Tensor, "tokens"],
    returns: Float[Tensor, "tokens"],
    *,
    clip_range: float,
    huber_delta: float = 0.0,
) -> Float[Tensor, "tokens"]:
    """Return ``0.5 * max((V - R)^2, (clip(V, V_old ± clip_range) - R)^2)`` per token, [N].

    ``clip_range`` 0 disables clipping. If ``huber_delta`` > 0, an error e beyond it counts
    ``2 * delta * (|e| - delta / 2)`` instead of e² (Huber 1964).
    """
    loss = _penalty(values - returns, huber_delta)
    if clip_range > 0.0:
        clipped = old_values + (values - old_values).clamp(-clip_range, clip_range)
        loss = torch.maximum(loss, _penalty(clipped - returns, huber_delta))
    return 0.5 * loss


def _penalty(error: Tensor, huber_delta: float) -> Tensor:
    if huber_delta == 0.0:
        return error.square()
    size = error.abs()
    return torch.where(size <= huber_delta, error.square(), huber_delta * (2.0 * size - huber_delta))


def explained_variance(values: Float[Tensor, "tokens"], returns: Float[Tensor, "tokens"]) -> float:
    """Return ``1 - Var(returns - values) / Var(returns)`` over [N] tokens; 0 if the returns do not vary.

    1: a perfect critic; 0: no better than a constant.
    """
    variance = returns.var(unbiased=False)
    if float(variance) <= 1e-12:
        return 0.0
    return float(1.0 - (returns - values).var(unbiased=False) / variance)

"""Losses of an update by formula, implemented again: of one sequence, at any ratio.

Nothing is imported from ``rlcore.algorithms``. A loss is a number per token; for its rounding tolerance it is
recomputed with each log-probability a little higher and lower.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rlcore.algorithms.agreement import LIMITS
from rlcore.config import CriticConfig, RlConfig, RolloutCorrectionConfig
from rlcore.training.audit.reference_impl import AlgorithmSpec

_LOG_RATIO = 20.0
_VALUE = {True: 0.03, False: 1e-4}  # rounding of a critic's value of 1, in half precision and in float32
_RELATIVE = {True: 0.05, False: 1e-3}  # rounding of a loss summed in another order, relative to it


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Tokens:
    """The policy's tokens of one sequence, [n] each; ``logprobs`` and ``entropy`` may carry a gradient.

    ``old``: None if the policy itself is the old one.
    """

    logprobs: Tensor
    entropy: Tensor
    advantages: Tensor
    sampler_logprobs: Tensor
    ref_logprobs: Tensor
    old: Tensor | None = None


def uncertainty(logprobs: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the rounding error of log-probabilities [n] in ``dtype``, nats: near 0 for confident predictions."""
    if dtype.itemsize >= 4:
        return 2e-6 + 5e-5 * -torch.expm1(logprobs.detach())
    return 0.5 * LIMITS[dtype].least.mean * (0.01 - torch.expm1(logprobs.detach()))


def policy_loss(row: AlgorithmSpec, tokens: Tokens, config: RlConfig, coefficient: float) -> Tensor:
    """Return the loss of each token [n], before its weight; ``coefficient``: of the KL in the loss."""
    old = tokens.logprobs.detach() if tokens.old is None else tokens.old
    own_ratio = (tokens.logprobs - old).clamp(-_LOG_RATIO, _LOG_RATIO)
    log_ratio = own_ratio
    if row.ratio == "sequence":
        log_ratio = own_ratio.mean().expand(len(own_ratio))
    elif row.ratio == "completion":
        log_ratio = own_ratio.sum().clamp(-_LOG_RATIO, _LOG_RATIO).expand(len(own_ratio))
    loss = _surrogate(row, log_ratio, tokens.logprobs, tokens.advantages)
    if coefficient > 0.0:
        loss = loss + coefficient * _kl(config.kl.estimator, tokens.logprobs - tokens.ref_logprobs, own_ratio.exp())
    loss = loss + row.beta * (own_ratio.exp() - 1.0 - own_ratio)
    loss = loss - config.update.entropy_coefficient * tokens.entropy
    weighted: Tensor = loss * _correction(old - tokens.sampler_logprobs, config.update.rollout_correction)
    return weighted


def policy_slack(
    row: AlgorithmSpec, tokens: Tokens, config: RlConfig, coefficient: float, dtype: torch.dtype
) -> Tensor:
    """Return the largest change of each token's loss [n] by rounding."""
    middle, error = policy_loss(row, tokens, config, coefficient), uncertainty(tokens.logprobs, dtype)
    twice = 2.0 * error if tokens.old is not None else error  # the old policy's have an error too
    moved = [
        policy_loss(row, replace(tokens, logprobs=tokens.logprobs + sign * twice), config, coefficient)
        for sign in (-1.0, 1.0)
    ]
    if tokens.old is None:  # the error of the reference policy adds to the policy's
        moved += [
            policy_loss(
                row, replace(tokens, ref_logprobs=tokens.ref_logprobs + sign * 2.0 * error), config, coefficient
            )
            for sign in (-1.0, 1.0)
        ]
    farthest = torch.stack([(each - middle).abs() for each in moved]).amax(0)
    return farthest + 4.0 * config.update.entropy_coefficient * error + _RELATIVE[dtype.itemsize < 4] * middle.abs()


@torch.no_grad()
def kl_parts(tokens: Tokens, dtype: torch.dtype, *, has_reference: bool) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the sums of KL(old || policy), and of KL to the reference policy, by metric, with their tolerances."""
    gaps = {} if tokens.old is None else {"kl/old": tokens.logprobs - tokens.old}
    if has_reference:
        gaps["kl/ref"] = tokens.ref_logprobs - tokens.logprobs
    error = 2.0 * uncertainty(tokens.logprobs, dtype)
    values = {name: (gap.expm1() - gap, gap.expm1().abs()) for name, gap in gaps.items()}
    return {
        name: (value.sum(), (_RELATIVE[False] * value + slope * error + error**2).sum())
        for name, (value, slope) in values.items()
    }


def is_marginal(row: AlgorithmSpec, tokens: Tokens, config: RlConfig, dtype: torch.dtype) -> bool:
    """Return True if a ratio or weight is so near to a bound that rounding decides on which side it is."""
    if tokens.old is None:
        return False
    own, error = tokens.logprobs.detach() - tokens.old, uncertainty(tokens.logprobs, dtype)
    ratios = {"token": own, "sequence": own.mean()[None], "completion": own.sum()[None]}[row.ratio].exp()
    spread = {"token": error, "sequence": error.mean()[None], "completion": error.sum()[None]}[row.ratio]
    bounds = [(ratios, bound) for bound in (1.0 - row.low, 1.0 + row.high, *([row.dual] if row.dual else []))]
    if row.surrogate == "dppo_tv":
        moved = tokens.logprobs.detach().exp() - tokens.old.exp()
        bounds = [(moved, bound) for bound in (-row.low, row.high)]
    if row.surrogate in ("sapo", "unclipped"):
        bounds = []
    found = any(bool(((values - bound).abs() < 2.0 * spread * values.abs()).any()) for values, bound in bounds)
    mismatch = config.update.rollout_correction
    gap = (tokens.old - tokens.sampler_logprobs).exp()
    weights = gap if mismatch.level == "token" else gap.log().mean().exp()[None]
    edges = (mismatch.low, mismatch.upper) if mismatch.mode == "mask" else ()
    return found or any(bool(((weights - edge).abs() < 1e-4 * edge).any()) for edge in edges)


def _surrogate(row: AlgorithmSpec, log_ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> Tensor:
    ratio, low, high = log_ratio.exp(), 1.0 - row.low, 1.0 + row.high
    if row.surrogate == "unclipped":
        return -ratio * advantages
    if row.surrogate == "cispo":
        return -ratio.detach().clamp(low, high) * advantages * logprobs
    is_clipped = ((ratio < low) & (advantages < 0)) | ((ratio > high) & (advantages > 0))
    if row.surrogate == "reinforce":
        return torch.where(is_clipped, 0.0, -ratio.detach() * advantages * logprobs)
    if row.surrogate == "sapo":
        tau = torch.where(advantages > 0, row.gate_positive, row.gate_negative)
        return -advantages * 4.0 / tau / (1.0 + (-tau * (ratio - 1.0)).exp())
    if row.surrogate == "dppo_tv":
        moved = logprobs.detach().exp() - (logprobs - log_ratio).detach().exp()
        far = ((moved < -row.low) & (advantages < 0)) | ((moved > row.high) & (advantages > 0))
        return torch.where(far, 0.0, -ratio * advantages)
    bound = torch.where(advantages > 0, ratio.clamp(max=high), ratio.clamp(min=low))
    if row.dual:
        bound = torch.where(advantages < 0, bound.clamp(max=row.dual), bound)
    return -bound * advantages


def _kl(estimator: str, gap: Tensor, ratio: Tensor) -> Tensor:
    gap = gap.clamp(-_LOG_RATIO, _LOG_RATIO)
    k3 = torch.expm1(-gap) + gap
    kinds = {
        "k1_ratio": ratio * gap,
        "k2": ratio.detach() * gap**2 / 2.0,
        "k3_ratio": ratio * k3,
        "k2_plain": gap**2 / 2.0,
        "k3_plain": k3,
    }
    return kinds[estimator]


def _correction(gap: Tensor, config: RolloutCorrectionConfig) -> Tensor:
    gap = gap.detach().clamp(-_LOG_RATIO, _LOG_RATIO)
    weight = (gap.mean().expand(len(gap)) if config.level == "sequence" else gap).exp()
    if config.mode == "mask":
        return torch.where((weight < config.low) | (weight > config.upper), 0.0, weight)
    return weight.clamp(max=config.upper) if config.mode == "truncate" else torch.ones_like(weight)


def value_loss(values: Tensor, old: Tensor, target: Tensor, config: CriticConfig) -> Tensor:
    """Return half the larger of the squared (or Huber) errors of the value and of the clipped value [n]."""
    errors = [(values - target).abs()]
    if config.clip_range:
        near = old + (values - old).clamp(-config.clip_range, config.clip_range)
        errors.append((near - target).abs())
    delta = config.huber_delta
    if delta:
        errors = [torch.where(e <= delta, e**2, delta * (2.0 * e - delta)) for e in errors]
    else:
        errors = [e**2 for e in errors]
    return 0.5 * torch.stack(errors).amax(0)


def value_slack(values: Tensor, old: Tensor, target: Tensor, config: CriticConfig, dtype: torch.dtype) -> Tensor:
    """Return the largest change of each token's critic loss [n] by rounding."""
    half = dtype.itemsize < 4
    middle, error = value_loss(values, old, target, config), _VALUE[half] * (1.0 + values.abs())
    moved = [value_loss(values + sign * error, old, target, config) for sign in (-1.0, 1.0)]
    return torch.stack([(each - middle).abs() for each in moved]).amax(0) + _RELATIVE[half] * middle


@torch.no_grad()
def kl_sums(logprobs: Tensor, old: Tensor, ref: Tensor, mask: Tensor) -> list[Tensor]:
    """Return the number of own tokens [N], and the sums of KL(old || policy) and KL(policy || ref) over them, nats."""
    gaps = [(logprobs - old).double(), (ref - logprobs).double()]
    own = [gap.masked_fill(~mask, 0.0).clamp(-_LOG_RATIO, _LOG_RATIO) for gap in gaps]
    return [mask.sum().double(), *((gap.expm1() - gap).sum() for gap in own)]

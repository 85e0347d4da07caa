"""Agreement of the engine's log-probabilities of its own completions with the learner's.

Rounding disturbs all logits about equally. A disturbance δ_v of the logits moves the log-probability of a token by δ_x
- Σ p_v δ_v, so by about (1 - p)·δ: almost nothing if the policy is confident. Divided by 1 - p the difference is that
of the log-odds. Multiplied by the temperature, which divides logits, its noise is about equal for all tokens and
temperatures. Two statistics:

- **spread**: mean and 95 % quantile of |difference| / (1 - p), compared with those *before any update*, when both
  hold the same weights.
- **temperature**: an engine at temperature T' instead of T differs by (T/T' - 1)·(log p + H), where H is the entropy of
  the learner's distribution. A regression on log p + H estimates T', with an error from its residuals.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from rlcore.errors import CanaryError

if TYPE_CHECKING:
    from jaxtyping import Float

SLACK = 0.01  # lower bound of 1 - p, because a float32 log-probability is uncertain by 1e-6 nats
QUANTILE = 0.95
TIMES_NOISE = 4.0  # largest spread, in multiples of the noise before any update
TEMPERATURE = 0.025  # largest relative error of the temperature ...
DRIFT = 0.1  # ... after updates in half precision, which rounds small updates differently in engine and learner ...
COLLAPSED = 0.01  # nats per token, the limit of the health rule for entropy
SIGMAS = 6.0  # ... or this number of standard errors, if there are few probes


_SMALLER = "lower learning_rate, and start again; if the policy was as certain before, check the engine"


@dataclass(frozen=True, kw_only=True, slots=True)
class LogprobAgreement:
    """Comparison of N tokens.

    Attributes:
        max_abs: Largest difference of a log-probability, nats.
        mean_odds: Mean difference of log-odds times the temperature, nats.
        high_odds: Its 95 % quantile.
        temperature: The engine's temperature, relative to the learner's.
        temperature_error: Its standard error.
        entropy: Mean entropy of the learner's distributions, nats per token.
    """

    num_tokens: int
    max_abs: float
    mean_odds: float
    high_odds: float
    temperature: float
    temperature_error: float
    entropy: float


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and 95 % quantile of differences of log-odds, nats."""

    mean: float
    high: float


@dataclass(frozen=True, kw_only=True, slots=True)
class AgreementLimits:
    """Limits of one precision.

    Attributes:
        least: A spread up to this is rounding, whatever the calibration.
        most: A larger spread is an error, even before the first update.
        max_abs: Largest difference of a log-probability, nats.
    """

    least: Spread
    most: Spread
    max_abs: float = math.inf


# benchmarks/canaries measures them; docs/benchmarks.md has the results. ``least`` is wide because rounding grows with
# logits, which grow in training. Small differences are found by comparing weights.
LIMITS: Mapping[torch.dtype, AgreementLimits] = MappingProxyType(
    {
        torch.float64: AgreementLimits(least=Spread(1e-3, 2e-3), most=Spread(1e-2, 2e-2), max_abs=1e-3),
        torch.float32: AgreementLimits(least=Spread(1e-3, 2e-3), most=Spread(1e-2, 2e-2), max_abs=1e-3),
        torch.float16: AgreementLimits(least=Spread(0.06, 0.25), most=Spread(0.12, 0.5)),
        torch.bfloat16: AgreementLimits(least=Spread(0.25, 2.0), most=Spread(0.5, 2.0)),
    }
)


def agreement(
    engine: Float[torch.Tensor, "engine_tokens"],
    learner: Float[torch.Tensor, "learner_tokens"],
    entropy: Float[torch.Tensor, "entropies"],
    *,
    temperature: float = 1.0,
) -> LogprobAgreement:
    """Compare log-probabilities [N] of the same tokens at the sampling ``temperature``.

    ``entropy``: of the learner's distributions, nats. NaN in an input gives NaN in the result.

    Raises:
        CanaryError: Different numbers of tokens, or none.
    """
    if not (engine.shape == learner.shape == entropy.shape and len(engine)):
        raise CanaryError(f"the probes have {len(learner)} tokens for the learner and {len(engine)} for the engine")
    engine, learner, entropy = engine.double(), learner.double(), entropy.double()
    difference = engine - learner
    room = (-torch.expm1(learner)).clamp(min=SLACK)
    odds = temperature * (difference / room).abs()
    slope, error = _slope((learner + entropy) / room, difference / room)
    return LogprobAgreement(
        num_tokens=len(engine),
        max_abs=float(difference.abs().max()),
        mean_odds=float(odds.mean()),
        high_odds=float(odds.quantile(QUANTILE)),
        temperature=1.0 / (1.0 + slope) if slope > -1.0 else math.inf,
        temperature_error=error,
        entropy=float(entropy.mean()),
    )


def check_agreement(found: LogprobAgreement, *, noise: Spread | None, dtype: torch.dtype) -> None:
    """Check that rounding explains the differences.

    Args:
        found: Comparison of engine and learner.
        noise: Spread before any update, or None if this is the first comparison.
        dtype: The lower precision of engine and learner.

    Raises:
        CanaryError: Another temperature, or a difference that rounding does not explain.
    """
    off, collapse = abs(found.temperature - 1.0), _collapse(found)
    least = DRIFT if noise is not None and dtype.itemsize < 4 else TEMPERATURE
    if not off <= max(least, SIGMAS * found.temperature_error):  # also if NaN
        raise CanaryError(
            f"{collapse}the engine samples at {found.temperature:.3f} times the trainer's temperature "
            f"(standard error {found.temperature_error:.3f}, {found.num_tokens} tokens)",
            fix=_SMALLER if collapse else "check the engine's logit processors: temperature, top-p, penalties",
        )
    limits = LIMITS[dtype]
    if not found.max_abs <= limits.max_abs:
        raise _differ(found, f"{found.max_abs:.3g} nats", f"{limits.max_abs:g}")
    bound = tolerance(noise, limits)
    if not (found.mean_odds <= bound.mean and found.high_odds <= bound.high):
        shown = f"{found.mean_odds:.3g} of log-odds on average, {found.high_odds:.3g} at the 95 % quantile"
        raise _differ(found, shown, f"{bound.mean:.3g} and {bound.high:.3g}")


def tolerance(noise: Spread | None, limits: AgreementLimits) -> Spread:
    """Return the largest accepted spread: a multiple of the noise, within the limits of the precision."""
    if noise is None:
        return limits.most
    least, most = limits.least, limits.most
    return Spread(
        mean=min(max(TIMES_NOISE * noise.mean, least.mean), most.mean),
        high=min(max(TIMES_NOISE * noise.high, least.high), most.high),
    )


def _differ(found: LogprobAgreement, difference: str, bound: str) -> CanaryError:
    collapse = _collapse(found)
    return CanaryError(
        f"{collapse}the engine's log-probabilities differ from the learner's by {difference} (limit {bound})",
        fix=_SMALLER if collapse else "compare precision and weights of both; a sync may have been partial",
    )


def _collapse(found: LogprobAgreement) -> str:
    """Return the likelier cause of a difference if the policy is certain of every token: rounding decides then."""
    if found.entropy >= COLLAPSED:
        return ""
    return (
        f"the policy has collapsed to an entropy of {found.entropy:.2g} nats per token, so the last update was too "
        "large: "
    )


def _slope(x: torch.Tensor, y: torch.Tensor) -> tuple[float, float]:
    """Return slope and White's standard error of least squares through the origin; (0, inf) if every x is 0."""
    power = float((x * x).sum())
    if power == 0.0:
        return 0.0, math.inf
    slope = float((x * y).sum()) / power
    residual = y - slope * x
    return slope, math.sqrt(float((residual * residual * x * x).sum())) / power

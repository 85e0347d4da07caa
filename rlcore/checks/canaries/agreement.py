"""How well an engine's log-probabilities of its own completions agree with the trainer's.

Rounding disturbs logits, all of them about alike. A disturbance δ_v of the logits moves the log-probability of a token
by δ_x - Σ p_v δ_v, so by about (1 - p)·δ: next to nothing where the policy is sure, everything where it is not. Divided
by 1 - p the difference is that of the log-odds, and times the temperature, which divides logits, its noise depends on
neither token nor temperature. (Between one and √2 times the noise of a logit, by how the rest is spread.) Two figures:

- **spread**: mean and 95 % quantile of |difference| / (1 - p). Against the same figures of a sound engine *before any
  update*, when both hold the same weights: that is the noise of this model, these kernels and this precision.
- **temperature**: an engine at temperature T' in place of T differs by (T/T' - 1)·(log p + H), H being the entropy of
  the trainer's distribution. A regression on log p + H finds T'; its error follows from the residuals, so it needs no
  table of noise at all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from rlcore.errors import CanaryError

SLACK = 0.01  # 1 - p is at least this: a float32 log-probability is itself uncertain by 1e-6 nats
QUANTILE = 0.95
TIMES_NOISE = 4.0  # a spread up to so many times the noise before any update is sound
TEMPERATURE = 0.025  # an engine's temperature may be off by this share ...
SIGMAS = 6.0  # ... or by so many standard errors, where the probes are few


@dataclass(frozen=True, kw_only=True, slots=True)
class LogprobAgreement:
    """What the comparison of N tokens found.

    ``max_abs``: largest difference of a log-probability, nats. ``mean_odds``, ``high_odds``: mean and 95 % quantile of
    the differences of log-odds times the temperature, nats. ``temperature``: the engine's, over the trainer's;
    ``temperature_error``: its standard error.
    """

    num_tokens: int
    max_abs: float
    mean_odds: float
    high_odds: float
    temperature: float
    temperature_error: float


@dataclass(frozen=True, slots=True)
class Spread:
    """Differences of log-odds, nats: their mean and their 95 % quantile."""

    mean: float
    high: float


@dataclass(frozen=True, kw_only=True, slots=True)
class AgreementLimits:
    """Of one precision.

    ``least``: a spread up to this is rounding, however quiet the start was. ``most``: one beyond it is none, before the
    first update either. ``max_abs``: of the largest difference of a log-probability, nats.
    """

    least: Spread
    most: Spread
    max_abs: float = math.inf


# benchmarks/canaries measures them; docs/benchmarks.md has the figures. The least are wide because a policy that grows
# sharper has larger logits, and rounding grows with them: what is small is the weights' comparison to find.
LIMITS: Mapping[torch.dtype, AgreementLimits] = MappingProxyType(
    {
        torch.float64: AgreementLimits(least=Spread(1e-3, 2e-3), most=Spread(1e-2, 2e-2), max_abs=1e-3),
        torch.float32: AgreementLimits(least=Spread(1e-3, 2e-3), most=Spread(1e-2, 2e-2), max_abs=1e-3),
        torch.float16: AgreementLimits(least=Spread(0.06, 0.25), most=Spread(0.12, 0.5)),
        torch.bfloat16: AgreementLimits(least=Spread(0.25, 1.0), most=Spread(0.5, 2.0)),
    }
)


def agreement(
    engine: torch.Tensor, learner: torch.Tensor, entropy: torch.Tensor, *, temperature: float = 1.0
) -> LogprobAgreement:
    """Compare log-probabilities of the same tokens, [N] each, at the ``temperature`` that they were sampled at.

    ``entropy``: of the learner's distributions, nats. NaN in any of them is NaN in what comes out.

    Raises:
        CanaryError: other numbers of tokens, or none.
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
    )


def check_agreement(found: LogprobAgreement, *, noise: Spread | None, dtype: torch.dtype) -> None:
    """``found`` is what rounding makes of equal weights.

    ``noise``: the spread before any update; None where this is the one before any update. ``dtype``: the coarser
    precision of engine and trainer.

    Raises:
        CanaryError: another temperature, or a difference that rounding does not make.
    """
    off = abs(found.temperature - 1.0)
    if not off <= max(TEMPERATURE, SIGMAS * found.temperature_error):  # NaN is a error too
        raise CanaryError(
            f"the engine samples at {found.temperature:.3f} times the trainer's temperature "
            f"(standard error {found.temperature_error:.3f}, {found.num_tokens} tokens)",
            fix="compare what the engine does to its logits before it draws: temperature, top-p, penalties",
        )
    limits = LIMITS[dtype]
    if not found.max_abs <= limits.max_abs:
        raise _differ(f"{found.max_abs:.3g} nats", f"{limits.max_abs:g}")
    bound = tolerance(noise, limits)
    if not (found.mean_odds <= bound.mean and found.high_odds <= bound.high):
        shown = f"{found.mean_odds:.3g} of log-odds on average, {found.high_odds:.3g} at the 95 % quantile"
        raise _differ(shown, f"{bound.mean:.3g} and {bound.high:.3g}")


def tolerance(noise: Spread | None, limits: AgreementLimits) -> Spread:
    """Up to which spread an engine is sound: a multiple of the noise, within what its precision allows at all."""
    if noise is None:
        return limits.most
    least, most = limits.least, limits.most
    return Spread(
        mean=min(max(TIMES_NOISE * noise.mean, least.mean), most.mean),
        high=min(max(TIMES_NOISE * noise.high, least.high), most.high),
    )


def _differ(found: str, bound: str) -> CanaryError:
    return CanaryError(
        f"the engine's log-probabilities differ from the learner's by {found} (bound {bound})",
        fix="compare precision and weights of the two; a sync may have been partial",
    )


def _slope(x: torch.Tensor, y: torch.Tensor) -> tuple[float, float]:
    """Least squares through the origin, with White's standard error; nothing is known where every x is 0."""
    power = float((x * x).sum())
    if power == 0.0:
        return 0.0, math.inf
    slope = float((x * y).sum()) / power
    residual = y - slope * x
    return slope, math.sqrt(float((residual * residual * x * x).sum())) / power

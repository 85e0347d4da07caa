"""Settings of the health rules: limits for warnings and stops, and the audit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Literal

from rlcore.errors import ConfigError
from rlcore.strict_config import Fraction, PositiveInt, above, below


@dataclass(frozen=True, kw_only=True, slots=True)
class Limit:
    """Complete limits of one health rule.

    A reading beyond ``warn`` gives a warning; ``patience`` consecutive readings beyond ``stop`` stop the run. Beyond
    means above if ``stop`` is larger than ``warn``, else below.
    """

    warn: float
    stop: float
    patience: int

    @property
    def is_upper(self) -> bool:
        return self.stop > self.warn

    def exceeds(self, reading: float, limit: float) -> bool:
        """Return True if a reading is beyond one of the two limits. Equality is within; NaN is beyond."""
        return not (reading <= limit if self.is_upper else reading >= limit)


# Several times the largest figures of early runs of small presets.
LIMITS: Mapping[str, Limit] = MappingProxyType(
    {
        "kl": Limit(warn=0.5, stop=2.0, patience=3),
        "clip": Limit(warn=0.4, stop=0.8, patience=5),
        "entropy": Limit(warn=0.01, stop=0.001, patience=5),
        "zero_signal": Limit(warn=0.9, stop=0.99, patience=10),
        "length": Limit(warn=4.0, stop=10.0, patience=5),
        "reward_hacking": Limit(warn=0.1, stop=0.25, patience=2),
        "critic": Limit(warn=-0.1, stop=-1.0, patience=10),
        "tools": Limit(warn=0.01, stop=0.001, patience=5),
        "mismatch": Limit(warn=0.01, stop=0.1, patience=3),
    }
)


@dataclass(frozen=True, kw_only=True)
class LimitConfig:
    """Limits of one rule; a value that is left out is the rule's default."""

    warn: float | None = None  # readings beyond it are logged; left out: the rule's default (docs/metrics.md)
    stop: float | None = None  # `patience` consecutive readings beyond it stop the run; left out: the rule's default
    patience: PositiveInt | None = None  # readings; left out: the rule's default


@dataclass(frozen=True, kw_only=True)
class AuditConfig:
    """Audit: recompute some rollouts of each iteration by a slow path; docs/reliability.md describes it."""

    # `stop` ends the run at the first discrepancy; `warn` only logs it; `off`: no audit
    action: Literal["stop", "warn", "off"] = "stop"
    max_time_fraction: Fraction = 0.02  # maximum fraction of the run's time; the first iteration is always audited
    rollouts: PositiveInt = 2  # audited rollouts per iteration
    false_alarm_rate: Annotated[float, above(0.0), below(1.0)] = 1e-6  # of the sampler test, per run


@dataclass(frozen=True, kw_only=True)
class HealthConfig:
    """Health rules of an online-RL run; docs/metrics.md describes each."""

    # `stop` warns, then stops the run and restores its last healthy checkpoint; `warn` only warns; `off`: no rules
    action: Literal["stop", "warn", "off"] = "stop"
    audit: AuditConfig = field(default_factory=AuditConfig)
    kl: LimitConfig = field(default_factory=LimitConfig)
    clip: LimitConfig = field(default_factory=LimitConfig)
    entropy: LimitConfig = field(default_factory=LimitConfig)
    zero_signal: LimitConfig = field(default_factory=LimitConfig)
    length: LimitConfig = field(default_factory=LimitConfig)
    reward_hacking: LimitConfig = field(default_factory=LimitConfig)
    critic: LimitConfig = field(default_factory=LimitConfig)
    tools: LimitConfig = field(default_factory=LimitConfig)
    mismatch: LimitConfig = field(default_factory=LimitConfig)

    def __post_init__(self) -> None:
        for name, limit in self.limits.items():
            if limit.warn == limit.stop or limit.is_upper != LIMITS[name].is_upper:
                order = "below" if LIMITS[name].is_upper else "above"
                raise ConfigError(f"{name}: warn = {limit.warn:g} must be {order} stop = {limit.stop:g}")

    @property
    def limits(self) -> Mapping[str, Limit]:
        """Limits of every rule, by name."""
        return {name: _resolve(getattr(self, name), default) for name, default in LIMITS.items()}


def _resolve(changed: LimitConfig, default: Limit) -> Limit:
    return Limit(
        warn=default.warn if changed.warn is None else changed.warn,
        stop=default.stop if changed.stop is None else changed.stop,
        patience=default.patience if changed.patience is None else changed.patience,
    )

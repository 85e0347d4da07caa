"""Settings of the health rules: the limits at which a run is warned about, and at which it is stopped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Literal

from rlcore.config.bounds import Fraction, PositiveInt
from rlcore.errors import ConfigError
from rlcore.strict import Above, Below


@dataclass(frozen=True, kw_only=True, slots=True)
class Limit:
    """One rule's bounds, complete.

    A reading beyond ``warn`` is warned of; one beyond ``stop``, ``patience`` readings in a row, stops the run. Beyond
    means above where ``stop`` is the larger of the two, else below.
    """

    warn: float
    stop: float
    patience: int

    @property
    def is_upper(self) -> bool:
        return self.stop > self.warn

    def exceeds(self, reading: float, bound: float) -> bool:
        """True if a reading is beyond one of the two bounds; one that equals it is within, and NaN within none."""
        return not (reading <= bound if self.is_upper else reading >= bound)


# Several times what the committed presets show: at most 0.15 nats, 0.8 % clipped, 2.7 times the length; entropy 0.016.
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
    """Limits of one rule; left out: the rule's own."""

    warn: float | None = None
    stop: float | None = None
    patience: PositiveInt | None = None


@dataclass(frozen=True, kw_only=True)
class AuditConfig:
    """The audit: each iteration some rollouts are worked out again by a slow path; docs/reliability.md describes it.

    ``action``: ``stop`` ends the run at the first difference, ``warn`` only says it.
    """

    action: Literal["stop", "warn", "off"] = "stop"
    max_time_fraction: Fraction = 0.02  # of the run's time that it may take; the first iteration is always looked at
    rollouts: PositiveInt = 2  # of an iteration that are looked at
    false_alarm_rate: Annotated[float, Above(0.0), Below(1.0)] = 1e-6  # chance that the test of the sampler stops a run


@dataclass(frozen=True, kw_only=True)
class HealthConfig:
    """Rules that watch every online-RL run; docs/metrics.md describes each.

    ``action``: ``stop`` warns, then stops the run and goes back to its last healthy checkpoint; ``warn`` only warns.
    """

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
        """Every rule's bounds, by its name."""
        return {name: _resolve(getattr(self, name), own) for name, own in LIMITS.items()}


def _resolve(changed: LimitConfig, own: Limit) -> Limit:
    return Limit(
        warn=own.warn if changed.warn is None else changed.warn,
        stop=own.stop if changed.stop is None else changed.stop,
        patience=own.patience if changed.patience is None else changed.patience,
    )

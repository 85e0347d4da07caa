"""Settings of retraining: allowed drift of new data, and requirements for a new reward model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from rlcore.config.bounds import Fraction, NonNegativeFloat
from rlcore.errors import ConfigError
from rlcore.strict_config import Above, AtLeast, Below


@dataclass(frozen=True, kw_only=True)
class DriftConfig:
    """Distances from the last accepted data at which a column warns, and at which the new data are rejected.

    ``psi``: population stability index, less its mean under chance; ``ks``: largest difference of cumulative fractions.
    A distance that chance alone exceeds with probability ``false_alarm_rate`` or more, by a permutation test, is
    ignored. ``accepted``: digests of snapshots (12 digits or more, as on the page) that a person has checked and
    accepts.
    """

    warn_psi: NonNegativeFloat = 0.1
    refuse_psi: NonNegativeFloat = 0.25
    warn_ks: Fraction = 0.1
    refuse_ks: Fraction = 0.25
    false_alarm_rate: Annotated[float, AtLeast(0.0001), Below(0.5)] = 0.001
    accepted: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("psi", "ks"):
            if getattr(self, f"warn_{name}") > getattr(self, f"refuse_{name}"):
                raise ConfigError(f"warn_{name} exceeds refuse_{name}: it would never warn")
        short = [digest for digest in self.accepted if len(digest) < 12]
        if short:
            raise ConfigError(f"accepted names {short[0]!r}: give at least 12 digits of the snapshot's digest")


@dataclass(frozen=True, kw_only=True)
class RetrainConfig:
    """Conditions for training from the champion; the section ``promotion`` decides on the promotion itself.

    A new reward model is compared with the champion's on held-out pairs on which neither was trained. The lower ends of
    the intervals of its accuracy and of their agreement must reach ``min_accuracy`` and ``min_agreement``. Its accuracy
    may be lower by at most ``accuracy_margin``, at the end of the interval.
    """

    drift: DriftConfig = field(default_factory=DriftConfig)
    min_accuracy: Fraction = 0.5
    min_agreement: Fraction = 0.7
    accuracy_margin: Fraction = 0.05
    confidence: Annotated[float, Above(0.0), Below(1.0)] = 0.95

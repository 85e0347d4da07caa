"""The plan: claims and their contrasts, written down before the runs."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from benchmarks.evidence.statistics import ALPHA
from rlcore.errors import ConfigError
from rlcore.strict_config import AtLeast, build

CLAIMS = Path(__file__).with_name("claims.toml")
MEASURES = ("accuracy", "learning", "score_at_equal_cpu", "memory")
NotNegative = Annotated[float, AtLeast(0.0)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Contrast:
    """A sum of arms with weights, on which a claim is judged.

    Attributes:
        expected: The claim says that the sum is above 0, about this large; or, if 0,
        margin: that it is within ± this.
        tasks: Tasks that it is measured on; none: those of the plan.
        primary: Judged, with an interval corrected for all that are; others only get a 95 % interval.
    """

    name: str
    arms: Mapping[str, float]
    measure: str
    expected: NotNegative = 0.0
    margin: NotNegative = 0.0
    tasks: tuple[str, ...] = ()
    primary: bool = True

    def __post_init__(self) -> None:
        if not self.arms or 0.0 in self.arms.values():
            raise ConfigError("arms: must name at least one arm, each with a weight other than 0")
        if self.measure not in MEASURES and not self.measure.startswith("figures."):
            raise ConfigError(f"measure = {self.measure!r}: must be one of {', '.join(MEASURES)} or figures.NAME")
        if (self.expected > 0.0) == (self.margin > 0.0):
            raise ConfigError("expected, margin: exactly one must be above 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """A claim in words, its contrasts, and the arms of its figure in order; ``name`` is the figure's file name."""

    name: str
    text: str
    source: str
    figure: Literal["curves", "bars", "memory", "dose", "optimisation", "preferences"]
    arms: tuple[str, ...]
    contrast: tuple[Contrast, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """All claims; ``sd``: expected standard deviation between runs of a measure; ``tasks``: of most contrasts."""

    tasks: tuple[str, ...]
    sd: Mapping[str, NotNegative]
    claim: tuple[Claim, ...]

    @property
    def every_task(self) -> tuple[str, ...]:
        """Tasks of the plan and of its contrasts, in order."""
        own = [task for claim in self.claim for contrast in claim.contrast for task in contrast.tasks]
        return tuple(dict.fromkeys([*self.tasks, *own]))

    @property
    def level(self) -> float:
        """Level of one primary interval: a contrast counts once per task (Bonferroni)."""
        contrasts = [contrast for claim in self.claim for contrast in claim.contrast if contrast.primary]
        return ALPHA / sum(len(contrast.tasks or self.tasks) for contrast in contrasts)


def read_plan(path: Path = CLAIMS) -> Plan:
    """Read a plan.

    Raises:
        ConfigError: A key or value is wrong; all are listed.
    """
    return build(Plan, tomllib.loads(path.read_text(encoding="utf-8")), source=str(path))

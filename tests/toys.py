"""A run's configuration in small, for tests of the pipeline around stages that are none of the project's own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

from rlcore.config import HardwareConfig
from rlcore.tasks.presets.run import RunConfig
from rlcore.tasks.presets.sections import Sections
from rlcore.tasks.presets.settings import BudgetConfig, TrackingConfig


@dataclass(frozen=True, kw_only=True)
class Level:
    """The part of an evaluation that pages read."""

    confidence: float = 0.9


@dataclass(frozen=True, kw_only=True)
class ToyConfig:
    """Configuration fields that the pipeline itself reads; subclasses add fields for their stages."""

    name: str = "toy"
    seed: int = 0
    retrain: None = None
    evaluation: Level = field(default_factory=Level)
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    budget: BudgetConfig = field(default_factory=BudgetConfig)

    @classmethod
    def run(cls, **changed: Any) -> RunConfig:
        """A configuration with these fields changed, typed as what it stands for."""
        return cast(RunConfig, cls(**changed))


def no_sections(config: RunConfig) -> Sections:
    """For a stage that reads nothing of the configuration."""
    return Sections({})

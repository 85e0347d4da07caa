"""Settings of the tools that show a run's curves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Tool = Literal["tensorboard", "wandb", "trackio"]


@dataclass(frozen=True, kw_only=True)
class TrackingConfig:
    """Tools that record the curves of each stage besides MLflow. No stage depends on them.

    ``also``: ``tensorboard`` and ``wandb`` write into folders of these names in the state directory, ``trackio`` into
    its own. Each needs the extra of its name. A stage is a run of the preset's project.
    """

    also: tuple[Tool, ...] = ()

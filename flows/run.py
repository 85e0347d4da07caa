"""What every flow does: read the preset, then run the stages that its targets need."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from flows.presets import open_preset
from flows.stages import stages
from tasks.artifacts import ArtifactRef
from tasks.disk import full_disk_named
from tasks.pipeline import PlanRow, plan, run_pipeline
from tasks.settings import configure_environment, configure_logging, find_home


def run_targets(preset: str, overrides: Sequence[str], targets: Collection[str]) -> dict[str, ArtifactRef]:
    """Run what the targets need and give the artifact of every stage by its name."""
    home = find_home()
    configure_environment(home)
    configure_logging()
    config = open_preset(preset, overrides)
    with full_disk_named(home.root):
        return dict(run_pipeline(stages(config), config, targets, home=home, experiment=config.name))


def plan_targets(preset: str, overrides: Sequence[str], targets: Collection[str]) -> tuple[PlanRow, ...]:
    """What :func:`run_targets` would do, without doing it."""
    config = open_preset(preset, overrides)
    return plan(stages(config), config, targets, home=find_home())


def targets_of_post_training(preset: str, overrides: Sequence[str]) -> tuple[str, ...]:
    """Everything that a preset describes."""
    return tuple(stage.name for stage in stages(open_preset(preset, overrides)))

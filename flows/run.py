"""What every flow does: read the preset, then run the stages that its targets need."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from flows.presets import open_preset
from flows.stages import stages
from rlcore.errors import ConfigError
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


def targets_of_reasoning(preset: str, overrides: Sequence[str]) -> tuple[str, ...]:
    """The last stage and what it needs: the comparison of all checkpoints of the chain.

    Raises:
        ConfigError: the preset lacks a section of the chain.
    """
    config = open_preset(preset, overrides)
    missing = [name for name in ("rejection", "sft_kept", "grpo_mixed") if getattr(config, name) is None]
    if missing:
        raise ConfigError(
            f"the flow reasoning needs the section{'s' if len(missing) > 1 else ''} {', '.join(missing)}",
            where=f"preset {preset}",
            fix="add what is missing, as in flows/presets/reasoning.toml",
        )
    return ("compare",)


TARGETS: Mapping[str, Callable[[str, Sequence[str]], tuple[str, ...]]] = {
    "post_train": targets_of_post_training,
    "reasoning": targets_of_reasoning,
}

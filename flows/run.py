"""What every flow does: read the preset, then run the stages that its targets need."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence

from flows.presets import open_preset
from flows.stages import promotion_stages, stages
from rlcore.errors import ConfigError
from tasks.artifacts import ArtifactRef
from tasks.disk import full_disk_named
from tasks.engine import report_markdown
from tasks.pipeline import PlanRow, plan, run_pipeline
from tasks.promote import current_champion, settings_of, settle
from tasks.registry import roll_back
from tasks.settings import configure_environment, configure_logging, find_home
from tasks.tracking import open_tracker

logger = logging.getLogger("tasks.promotion")  # below "tasks", whose lines are shown


def run_targets(preset: str, overrides: Sequence[str], targets: Collection[str]) -> dict[str, ArtifactRef]:
    """Run what the targets need and give the artifact of every stage by its name."""
    home = find_home()
    configure_environment(home)
    configure_logging()
    config = open_preset(preset, overrides)
    with full_disk_named(home.root):
        return dict(run_pipeline(stages(config), config, targets, home=home, experiment=config.name))


def run_promotion(preset: str, overrides: Sequence[str]) -> dict[str, ArtifactRef]:
    """Make what is not cached, judge the challenger, and move the registry's aliases as the verdict says."""
    home = find_home()
    configure_environment(home)
    configure_logging()
    config = open_preset(preset, overrides)
    settings_of(config)  # refused before any work
    with full_disk_named(home.root):
        champion = current_champion(home, config)
        table = promotion_stages(config, champion)
        refs = dict(run_pipeline(table, config, ["promote"], home=home, experiment=config.name))
        outcome = settle(home, config, refs, over=champion)
    logger.info("%s", outcome)
    report_markdown("outcome of the promotion", outcome)
    return refs


def run_roll_back(model: str, version: int, reason: str) -> str:
    """Take the champion ``version`` of a registered model down; which version is champion again, in a sentence."""
    home = find_home()
    configure_environment(home)
    configure_logging()
    champion = roll_back(home, open_tracker(home), model, version=version, reason=reason)
    outcome = f"{model}: version {version} is taken down, version {champion.version} is champion again"
    logger.info("%s", outcome)
    report_markdown("outcome of the roll-back", outcome)
    return outcome


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

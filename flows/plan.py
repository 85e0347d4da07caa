"""Checks and plan of a run before its work. Nothing here imports a step, Prefect or MLflow."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rlcore.errors import RlcoreError
from rlcore.flows.presets import open_preset, open_unvalidated
from rlcore.flows.stages import stages
from rlcore.tasks.pipeline.plan import PlanRow, plan, recorded_refs
from rlcore.tasks.pipeline.preflight import preflight
from rlcore.tasks.presets.run import RunConfig
from rlcore.tasks.store.settings import Home, find_home


def preflight_lines(config: RunConfig, targets: Collection[str], *, home: Home) -> list[str]:
    """Return human-readable lines about a run before its work.

    Raises:
        ConfigError: all errors that can be found before the run, each with its full key.
    """
    try:
        table = stages(config)
        known = [each.name for each in table]
        named = targets if set(targets) <= set(known) else known  # a promotion needs all
        refs = recorded_refs(table, config, named, home=home)
    except RlcoreError:
        preflight(config, home, targets, {})  # preflight reports it with all others
        raise
    return preflight(config, home, targets, refs)


def plan_targets(preset: str, overrides: Sequence[str], targets: Collection[str]) -> tuple[PlanRow, ...]:
    """Return the plan of :func:`run_targets` without running it.

    Raises:
        ConfigError: all errors that can be found before the run, each with its full key.
    """
    config, home = open_preset(preset, overrides), find_home()
    preflight_lines(config, targets, home=home)
    return plan(stages(config), config, targets, home=home)


def plan_memory(preset: str, overrides: Sequence[str], targets: Collection[str]) -> list[str]:
    """Return lines on the targets' memory and disk, as far as the base is known, and on unusual values.

    Raises:
        ConfigError: as :func:`plan_targets`.
    """
    return preflight_lines(open_preset(preset, overrides), targets, home=find_home())


def every_target(preset: str, overrides: Sequence[str]) -> tuple[str, ...]:
    """Return all targets of a preset.

    Raises:
        ConfigError: as :func:`plan_targets`.
    """
    config = open_unvalidated(preset, overrides)
    preflight(config, find_home(), None, None)
    return tuple(stage.name for stage in stages(config))

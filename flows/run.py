"""Common start of all flows: read the preset, then run the stages that its targets need."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from rlcore.errors import ConfigError
from rlcore.flows.plan import preflight_lines
from rlcore.flows.presets import FOLDER, open_preset, preset_path
from rlcore.flows.stages import stages
from rlcore.tasks.presets.run import RunConfig, read_chain
from rlcore.tasks.report.run_data import Origin
from rlcore.tasks.report.run_page import publish_report
from rlcore.tasks.run.budget import budget_period
from rlcore.tasks.run.pipeline import Report, run_pipeline
from rlcore.tasks.store.artifacts import ArtifactRef
from rlcore.tasks.store.settings import Home, configure_environment, configure_logging, find_home
from rlcore.tasks.store.storage import raise_on_full_disk

logger = logging.getLogger("rlcore.plan")


def run_targets(preset: str, overrides: Sequence[str], targets: Collection[str]) -> dict[str, ArtifactRef]:
    """Run the stages that the targets need; return the artifacts by stage name."""
    home, config = start_run(preset, overrides, targets)
    report = report_of("run", preset, overrides)
    with watched(home, config, "run", preset, overrides):
        return dict(run_pipeline(stages(config), config, targets, home=home, experiment=config.name, report=report))


def start_run(
    preset: str, overrides: Sequence[str], targets: Collection[str], *, section: tuple[str, type[Any]] | None = None
) -> tuple[Home, RunConfig]:
    """Open a preset, require a section, and check the run; return the state directory and the preset."""
    home = open_home()
    config = open_preset(preset, overrides)
    if section:
        config.section(*section, where=preset)
    lines = preflight_lines(config, targets, preset=preset, home=home)
    for line in lines:  # the memory plan follows when the model is imported
        if line.startswith(("warning:", "evaluation:")):
            logger.warning("%s", line)
    return home, config


@contextmanager
def watched(home: Home, config: RunConfig, name: str, preset: str, overrides: Sequence[str]) -> Iterator[None]:
    """Run a block of the flow ``name`` within its budget, and name a full disk."""

    def resume(limit: str) -> str:
        key = limit.partition("=")[0]
        return _command(name, preset, [*(each for each in overrides if each.partition("=")[0] != key), limit])

    with raise_on_full_disk(home.root), budget_period(home, config, resume=resume):
        yield


def _command(name: str, preset: str, overrides: Sequence[str]) -> str:
    return shlex.join(["rlcore", name, preset, *(word for each in overrides for word in ("--set", each))])


def report_of(name: str, preset: str, overrides: Sequence[str]) -> Report:
    """Return the function that writes a run's report, which names the command and the preset that was extended."""
    command, base_name = _command(name, preset, overrides), _extended(preset)
    try:
        base = open_preset(base_name) if overrides or base_name != preset else None
    except ConfigError:  # incomplete by itself
        base = None
    return partial(publish_report, origin=Origin(command=command, base_name=base_name, base=base))


def _extended(preset: str) -> str:
    """Return the preset that one extends, for :func:`open_preset`; itself if it extends none."""
    *_, base, _ = (None, *read_chain(preset_path(preset), FOLDER))
    return preset if base is None else base.stem if base.parent == FOLDER else str(base)


def open_home() -> Home:
    """Prepare and return the state directory of the process that runs a flow."""
    home = find_home()
    configure_environment(home)
    configure_logging()
    return home

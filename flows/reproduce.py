"""Reproduction of a registered version from its records, in a scratch directory; the command ``reproduce``."""

from __future__ import annotations

import shutil
from dataclasses import dataclass

from rlcore.flows.presets import open_preset
from rlcore.flows.stages import retrain_stages, stages
from rlcore.tasks.run.pipeline import run_pipeline
from rlcore.tasks.run.reproduce import changes, compare, config_of, find_origin, machines, scratch_home, with_date
from rlcore.tasks.store.settings import find_home
from rlcore.tasks.tracking.lineage import ChampionLineage


@dataclass(frozen=True, kw_only=True)
class Reproduction:
    """The result of a reproduction: True if the bytes are equal, and human-readable lines about differences."""

    is_equal: bool
    lines: tuple[str, ...]


def run_reproduce(model: str, preset: str = "", *, force: bool = False) -> Reproduction:
    """Rerun the stages of ``model`` and compare the model's files.

    ``preset`` provides sections that none of its stages used; default: the version's own. Nothing runs if data are
    missing, or unless ``force``, if code, library versions, data or the machine have changed.
    Raises:
        ModelError: no such version, or no record of its origin.
        ConfigError: the preset cannot be opened.
    """
    home = find_home()
    origin = find_origin(home, model)
    config = config_of(origin, open_preset(preset or origin.tags["preset"]))
    start = origin.start
    table = retrain_stages(config, start, ChampionLineage(artifacts={}, recipe="")) if start else stages(config)
    machine = machines(origin, config)
    gone, changed = changes(home, origin, table, config)
    if gone or (changed and not force):
        errors = [*(f"gone: {line}" for line in gone), *(f"changed: {line}" for line in changed)]
        return Reproduction(is_equal=False, lines=(*machine, *errors, "nothing was run"))
    target = origin.chain[-1].ingredients["stage"]["name"]
    config = with_date(home, origin, config)
    with scratch_home(home, origin, table, config) as scratch:
        refs = run_pipeline(table, config, [target], home=scratch, experiment=config.name)
        different = compare(home, origin, scratch, refs)
    before = [*machine, *(f"changed: {line}" for line in changed)]
    if different:
        return Reproduction(is_equal=False, lines=(*before, *different, f"both are kept: {scratch.root}"))
    shutil.rmtree(scratch.root)
    name = f"{origin.version.name} version {origin.version.version}"
    return Reproduction(is_equal=True, lines=(*before, f"{name}: every file of the model is the same"))

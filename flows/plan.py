"""Checks and plan of a run before its work.

Keys come first: if all results are cached, a run would do nothing, and nothing else is checked. What takes seconds to
import (torch for keys, transformers for checks) is imported by what needs it, so that a wrong key is known at once.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlcore.errors import RlcoreError
from rlcore.flows.presets import open_draft
from rlcore.tasks.presets.graph import terms_of
from rlcore.tasks.presets.run import Draft, RunConfig, validated
from rlcore.tasks.store.settings import Home, find_home

if TYPE_CHECKING:
    from rlcore.tasks.keys.plan import PlanRow
    from rlcore.tasks.store.artifacts import ArtifactRef


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """Plan of a run: a row for each stage, and lines on memory, disk, time, unusual values."""

    config: RunConfig
    rows: tuple[PlanRow, ...]
    lines: tuple[str, ...]

    @property
    def is_cached(self) -> bool:
        """True if no stage would run."""
        return all(row.state == "cached" for row in self.rows)

    @property
    def summary(self) -> str:
        """The number of stages to run, with their names and the estimated time."""
        pending = [row.stage for row in self.rows if row.state not in ("cached", "shared")]
        if not pending:
            return f"{self.config.name}: all {len(self.rows)} stages are cached, nothing is computed"
        time = next((f"; {line}" for line in self.lines if line.startswith("time:")), "")
        return f"{self.config.name}: {len(pending)} of {len(self.rows)} stages to run: {', '.join(pending)}{time}"


def plan_run(
    preset: str, overrides: Sequence[str], targets: Collection[str] | None = None, *, is_verified: bool = True
) -> RunPlan:
    """Return the plan of a run of ``targets``, by default of every stage. Nothing runs.

    ``is_verified``: cached artifacts are hashed, so that damaged ones are noticed.

    Raises:
        ConfigError: all errors that can be found before the run, by file, each with its full key.
    """
    home = find_home()
    config = _whole(open_draft(preset, overrides), home, preset)
    from rlcore.flows.stages import stages
    from rlcore.tasks.keys.plan import deleted_lines, look_up

    try:
        table = stages(config)
        named = tuple(stage.name for stage in table) if targets is None else targets
        rows, refs = look_up(table, config, named, home=home, is_verified=is_verified)
    except RlcoreError:  # of a source that cannot be read: with all others
        _preflight(config, home, targets, {}, preset=preset)
        raise
    lines = [] if all(row.state == "cached" for row in rows) else _preflight(config, home, named, refs, preset=preset)
    return RunPlan(config=config, rows=rows, lines=(*lines, *deleted_lines(refs, home)))


def preflight_lines(config: RunConfig, targets: Collection[str], *, preset: str, home: Home) -> list[str]:
    """Return human-readable lines about a run of a preset, which was read from ``preset``, before its work.

    Raises:
        ConfigError: all errors that can be found before the run, by file, each with its full key.
    """
    from rlcore.flows.stages import stages
    from rlcore.tasks.keys.plan import recorded_refs

    try:
        table = stages(config)
        known = [each.name for each in table]
        named = targets if set(targets) <= set(known) else known  # a promotion needs all
        refs = recorded_refs(table, config, named, home=home)
    except RlcoreError:
        _preflight(config, home, targets, {}, preset=preset)
        raise
    return [] if refs.keys() >= set(targets) else _preflight(config, home, targets, refs, preset=preset)


def every_target(preset: str, overrides: Sequence[str]) -> tuple[str, ...]:
    """Return all targets of a preset.

    Raises:
        ConfigError: errors of its keys, values or graph, with all others.
    """
    config = _whole(open_draft(preset, overrides), find_home(), preset)
    from rlcore.flows.stages import stages

    return tuple(stage.name for stage in stages(config))


def _whole(draft: Draft, home: Home, preset: str) -> RunConfig:
    """Return a draft's configuration, or raise its errors with those of the files that the preset names."""
    if draft.errors and (draft.config is None or not _names_files(draft.config)):
        return draft.whole
    config = draft.config
    if config is None:
        return draft.whole
    if draft.errors:  # known at once; what follows takes seconds to import
        sys.stderr.write("\n".join((*draft.errors, f"{draft.source}: checking rows, model and functions too …\n")))
        sys.stderr.flush()
    if draft.errors or config.errors:
        _preflight(config, home, None, {}, preset=preset, earlier=draft.errors)
    return validated(config, draft.source)


def _names_files(config: RunConfig) -> bool:
    terms = [term for stage in config.stages.values() for term in terms_of(stage).values()]
    rows = any(data.files for data in config.data.values())
    return rows or config.model.source not in ("scratch", "hub", "registry") or any(term.module for term in terms)


def _preflight(
    config: RunConfig,
    home: Home,
    targets: Collection[str] | None,
    refs: Mapping[str, ArtifactRef],
    *,
    preset: str,
    earlier: Sequence[str] = (),
) -> list[str]:
    from rlcore.tasks.preflight.preflight import preflight
    from rlcore.tasks.promotion.approvers import approver_errors

    of_approvers = approver_errors(home) if config.promotion else ()
    return preflight(config, home, targets, refs, preset=preset, earlier=[*earlier, *of_approvers])

"""Stages that would run again after an upgrade of rlcore, of a package or of the machine, by cause."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from rlcore.tasks.kinds.kind import Stage
from rlcore.tasks.pipeline.cache_keys import describe, nearest
from rlcore.tasks.pipeline.earlier_results import own_work
from rlcore.tasks.pipeline.key_inputs import key_inputs
from rlcore.tasks.pipeline.live_view import duration
from rlcore.tasks.pipeline.plan import look_up, order_stages
from rlcore.tasks.presets.run import RunConfig
from rlcore.tasks.store.artifacts import ArtifactRef
from rlcore.tasks.store.cache import Record, StageCache
from rlcore.tasks.store.settings import Home

_KINDS = ("stage", "code", "versions", "machine")  # kinds of key inputs that an upgrade changes
_MAX_MODULES = 5  # of changed code that is named
_FOLLOWS, _OTHER = "if the result of a stage above changes", "for reasons of the preset: see `rlcore plan`"


@dataclass(frozen=True, kw_only=True)
class Rerun:
    """Stage with an earlier result that would run again for a ``cause``; ``seconds``: its earlier result took them."""

    stage: str
    cause: str
    seconds: float


def find_reruns(stages: Sequence[Stage], config: RunConfig, home: Home) -> tuple[Rerun, ...]:
    """Return the stages of a preset that have results, and would run again. Only records are read."""
    names, cache = [stage.name for stage in stages], StageCache(home.cache)
    rows, known = look_up(stages, config, names, home=home, is_verified=False)
    found = []
    for row, stage in zip(rows, order_stages(stages, names), strict=True):
        own = _own(stage.name, config.name, cache)
        if own and row.state in ("run", "depends"):
            found.append(_rerun(stage, config, known, own))
    return tuple(found)


def format_reruns(preset: str, reruns: Sequence[Rerun]) -> str:
    """Format the stages by cause, with the time that their earlier results took."""
    if not reruns:
        return f"{preset}: no stage with a result would run again\n"
    lines = [f"{preset}: {len(reruns)} stages with results would run again, {_took(reruns)} of work"]
    for cause in dict.fromkeys(each.cause for each in reruns):
        group = [each for each in reruns if each.cause == cause]
        lines += [cause, f"  {', '.join(each.stage for each in group)}: {_took(group)}"]
    return "\n".join(lines) + "\n"


def _own(stage: str, preset: str, cache: StageCache) -> Sequence[Record]:
    """Return the results of a preset; those of any preset if versions without notes of uses made all of them."""
    records = cache.records(stage)
    is_noted = any(path.is_dir() for path in (cache.folder / stage).glob("*"))
    return own_work(records, stage, preset, cache) if is_noted else records


def _rerun(stage: Stage, config: RunConfig, known: Mapping[str, ArtifactRef], own: Sequence[Record]) -> Rerun:
    """Return a stage with the cause of its run: the differences from the most similar result of its preset."""
    inputs, unknown = key_inputs(stage, config, known), [name for name in stage.inputs if name not in known]
    closest = nearest(inputs, own, unknown=unknown)
    assert closest is not None  # own is not empty
    record, found = closest
    changed = {kind: names for kind, names in found.items() if kind in _KINDS}
    if len(changed.get("code", ())) > _MAX_MODULES:
        changed["code"] = ()  # a release changes most, and stages would not be grouped
    cause = describe(record.ingredients, inputs, changed) or (_OTHER if found or not unknown else _FOLLOWS)
    return Rerun(stage=stage.name, cause=cause, seconds=record.seconds)


def _took(reruns: Collection[Rerun]) -> str:
    return duration(sum(each.seconds for each in reruns))

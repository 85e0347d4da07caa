"""Plan of a run: the stages in order, what is cached, and why others would run."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import Literal

from rlcore.errors import ConfigError
from rlcore.tasks.keys.cache_keys import explain_miss, key_of
from rlcore.tasks.keys.earlier_work import damage, find_result, find_start, first_run, own_work, saved_iteration
from rlcore.tasks.keys.key_inputs import key_inputs
from rlcore.tasks.keys.shared_results import shared_records
from rlcore.tasks.kinds.kind import Stage
from rlcore.tasks.presets.run import RunConfig
from rlcore.tasks.store.artifacts import ArtifactRef, ArtifactStore
from rlcore.tasks.store.cache import StageCache
from rlcore.tasks.store.locks import is_held
from rlcore.tasks.store.remembered import remembering
from rlcore.tasks.store.settings import Home
from rlcore.tasks.tracking.database import database_of, deleted_runs


@dataclass(frozen=True, kw_only=True)
class PlanRow:
    """Planned action for a stage.

    ``cached``: an intact result exists. ``run``: it will be computed for ``reason``. ``depends``: an upstream stage
    runs, and this one runs only if that result changes. ``running``: another process computes it now. ``shared``: its
    result is in the shared store, and will be fetched.
    """

    stage: str
    state: Literal["cached", "run", "depends", "running", "shared"]
    reason: str


def order_stages(stages: Sequence[Stage], targets: Collection[str]) -> tuple[Stage, ...]:
    """Return the targets and everything that they need, each after its inputs, otherwise in the given order.

    Raises:
        ConfigError: two stages of one name, an unknown name, or stages that depend on each other.
    """
    known = {stage.name: stage for stage in stages}
    if len(known) != len(stages):
        raise ConfigError(f"two stages have the same name: {', '.join(stage.name for stage in stages)}")
    needed: dict[str, tuple[str, ...]] = {}
    waiting = list(targets)
    while waiting:
        name = waiting.pop()
        if name not in known:
            raise ConfigError(f"unknown stage {name!r}", fix=f"choose among {', '.join(known)}")
        if name not in needed:
            needed[name] = known[name].inputs
            waiting += known[name].inputs
    try:
        ordered = TopologicalSorter({name: needed[name] for name in known if name in needed}).static_order()
        return tuple(known[name] for name in ordered)
    except CycleError as error:
        raise ConfigError(
            f"stages depend on each other: {' -> '.join(error.args[1])}",
            fix="change init_from or data of one stage",
        ) from error


def look_up(
    stages: Sequence[Stage], config: RunConfig, targets: Collection[str], *, home: Home, is_verified: bool = True
) -> tuple[tuple[PlanRow, ...], Mapping[str, ArtifactRef]]:
    """Return the plan of a run of ``targets``, and the artifacts of the stages that would not run, by name.

    ``is_verified``: files are hashed; else damaged files are not noticed.
    """
    cache = StageCache(home.cache)
    known: dict[str, ArtifactRef] = {}
    rows = list[PlanRow]()
    with remembering(home.source_facts):
        for stage in order_stages(stages, targets):
            row, ref = _plan_stage(stage, config, known, cache, home, is_verified=is_verified)
            rows.append(row)
            if ref is not None:
                known[stage.name] = ref
    return tuple(rows), {row.stage: known[row.stage] for row in rows if row.state == "cached"}


def cached_refs(
    stages: Sequence[Stage], config: RunConfig, targets: Collection[str], *, home: Home
) -> Mapping[str, ArtifactRef]:
    """Return the artifacts of the stages that would not run now, by name, verified by hashing. Nothing runs."""
    return look_up(stages, config, targets, home=home)[1]


def recorded_refs(
    stages: Sequence[Stage], config: RunConfig, targets: Collection[str], *, home: Home
) -> Mapping[str, ArtifactRef]:
    """Return :func:`cached_refs` from the records alone: damaged files are not noticed."""
    return look_up(stages, config, targets, home=home, is_verified=False)[1]


def deleted_lines(refs: Mapping[str, ArtifactRef], home: Home) -> list[str]:
    """Return a line about cached stages whose run a person deleted in the embedded MLflow."""
    path = database_of(home)
    gone = deleted_runs(path) if path and path.is_file() else set()
    names = [name for name, ref in refs.items() if ref.mlflow_run_id in gone]
    return [f"mlflow: the run of {', '.join(names)} was deleted; the next run publishes its results"] if names else []


def format_plan(rows: Iterable[PlanRow]) -> str:
    """Format the plan as human-readable lines."""
    rows = tuple(rows)
    width = max((len(row.stage) for row in rows), default=0)
    return "\n".join(f"{row.stage:<{width}}  {row.state:<7}  {row.reason}".rstrip() for row in rows)


def _plan_stage(
    stage: Stage,
    config: RunConfig,
    known: Mapping[str, ArtifactRef],
    cache: StageCache,
    home: Home,
    *,
    is_verified: bool,
) -> tuple[PlanRow, ArtifactRef | None]:
    ingredients, store = key_inputs(stage, config, known), ArtifactStore(home.root)
    unknown = [name for name in stage.inputs if name not in (*known, *stage.observed)]
    if unknown:
        records = cache.records(stage.name)
        if explain_miss(ingredients, records, unknown=unknown):
            own, first = own_work(records, stage.name, config.name, cache), first_run(config.name, cache)
            reason = explain_miss(ingredients, own, unknown=unknown, first=first)
            return PlanRow(stage=stage.name, state="run", reason=reason), None
        return PlanRow(stage=stage.name, state="depends", reason=f"on the result of {', '.join(unknown)}"), None
    record, note = find_result(stage, stage.sections(config), ingredients, cache, store)
    errors = store.errors(record.ref) if record and is_verified else ()
    if record and not errors:
        return PlanRow(stage=stage.name, state="cached", reason=note), record.ref
    if shared := shared_records(stage.name, key_of(ingredients)):
        return PlanRow(stage=stage.name, state="shared", reason="in the shared store"), shared[0].ref
    if is_held(home.work / f"{key_of(ingredients)}.lock"):
        return PlanRow(stage=stage.name, state="running", reason=saved_iteration(stage, ingredients, home)), None
    start = find_start(stage, config, ingredients, home, note=damage(errors) if errors else note)
    return PlanRow(stage=stage.name, state="run", reason=start.text), None

"""Earlier results that serve a stage, whatever watched the run that made them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from rlcore.errors import StorageError
from rlcore.tasks.keys.cache_keys import (
    OBSERVERS,
    OUTCOME,
    E,
    Earlier,
    differences,
    key_of,
    nearest,
    setting_changes,
    without_outcome,
)
from rlcore.tasks.keys.key_inputs import key_inputs
from rlcore.tasks.kinds.kind import Stage
from rlcore.tasks.presets.run import RunConfig
from rlcore.tasks.presets.sections import Sections
from rlcore.tasks.store.artifacts import CLEANED, ArtifactRef, ArtifactStore
from rlcore.tasks.store.cache import KeyInputs, Record, StageCache
from rlcore.tasks.store.storage import flatten

_HARDWARE = {"precision": "hardware.dtype", "threads": "hardware.num_threads"}  # facts of a machine that a preset sets


def find_result(
    stage: Stage, sections: Sections, ingredients: KeyInputs, cache: StageCache, store: ArtifactStore
) -> tuple[Record | None, str]:
    """Return the record of a result that these key inputs and observers would have, and a note about it.

    A result serves other observers if their rules stop its run where it was stopped, or not at all. The note names
    observers that differ, or says why a record of the key does not serve. Files of the artifact are not verified.
    """
    note = ""
    for record in _candidates(stage, key_of(ingredients), cache):
        absent = store.absence(record.ref)
        note = damage([absent]) if absent else other_stop(stage, sections, store.root / record.ref.uri)
        if not note:
            return record, _watched_otherwise(stage, record.ingredients, ingredients)
    return None, note


def _candidates(stage: Stage, key: str, cache: StageCache) -> Iterator[Record]:
    if (plain := cache.find(stage.name, key)) is not None:
        yield plain
    stopped = (each for each in cache.records(stage.name) if OUTCOME in each.ingredients) if stage.continuation else ()
    yield from (each for each in stopped if use_key(each) == key)


def use_key(work: Earlier) -> str:
    """Return the key by which runs note that they need a result, and lock its stage."""
    if isinstance(work, Record) and OUTCOME not in work.ingredients:
        return work.key
    return key_of(without_outcome(work.ingredients))


def own_work(earlier: Iterable[E], stage: str, preset: str, cache: StageCache) -> list[E]:
    """Return the earlier work of a stage that runs of a preset have done or needed."""
    used = cache.used_keys(stage, preset)
    return [each for each in earlier if use_key(each) in used]


def first_run(preset: str, cache: StageCache) -> str:
    """Return the reason of a stage that runs, although no noted run of its preset has needed it before."""
    return f"first run of this {'stage' if cache.is_used(preset) else 'preset'}"


def other_stop(stage: Stage, sections: Sections, folder: Path) -> str:
    """Say how the rules of these sections end the run in an artifact otherwise than it ended; empty if not."""
    if stage.continuation is None:
        return ""
    try:
        history, stop = stage.continuation.recorded(folder)
    except StorageError as error:
        return damage([error.what])
    wanted = stage.continuation.stop(history, sections)
    if wanted == stop:
        return ""
    if wanted:
        return f"health.{wanted['rule']} stops the earlier run after iteration {wanted['iteration']}"
    assert stop is not None
    return f"health.{stop['rule']} stopped the earlier run after iteration {stop['iteration']}, and no longer does"


def damage(errors: Sequence[str]) -> str:
    """Say why a recorded result cannot be used."""
    return errors[0] if errors[0].startswith(CLEANED) else f"artifact missing or damaged: {errors[0]}"


def _watched_otherwise(stage: Stage, old: KeyInputs, new: KeyInputs) -> str:
    before, after = old.get(OBSERVERS, {}), new.get(OBSERVERS, {})
    names = differences({"config": before}, {"config": after}).get("config", ())
    if not names:
        return ""
    reused = "weights and recorded curve are" if stage.continuation else "the result is"
    return f"{reused} reused although {', '.join(setting_changes(before, after, names))}"


def overrides_of_results(
    stages: Iterable[Stage], config: RunConfig, known: Mapping[str, ArtifactRef], cache: StageCache
) -> list[str]:
    """Return overrides by which a preset has the settings of the most similar earlier results that it lacks.

    ``known``: its results. A setting that results do not have is left out: no override unsets it.
    """
    found: dict[str, str] = {}
    for stage in stages:
        ingredients, unknown = key_inputs(stage, config, known), [name for name in stage.inputs if name not in known]
        own = own_work(cache.records(stage.name), stage.name, config.name, cache)
        closest = nearest(ingredients, own, unknown=unknown)
        if stage.name in known or closest is None:
            continue
        old, changed = closest[0].ingredients, closest[1]
        machine = old.get("machine") or {}
        values = flatten(old["config"])
        names = {name: f"stages.{stage.name}.{name.removeprefix('stage.')}" for name in values if name[:6] == "stage."}
        found |= {
            {"confidence": "evaluation.confidence", **names}.get(name, name): json.dumps(values[name])
            for name in changed.get("config", ())
            if values.get(name) is not None
        }
        moved = machine.keys() & changed.get("machine", ())
        found |= {key: json.dumps(machine[fact]) for fact, key in _HARDWARE.items() if fact in moved}
        found |= {"seed": str(old["seed"])} if "seed" in changed else {}
    return [f"{name}={value}" for name, value in found.items()]

"""Earlier results that serve a stage, whatever watched the run that made them, and checkpoints that it continues.

Checkpoints are those of an interrupted attempt, in its work folder, or the last ones of a finished run, which stay in
``checkpoints/<preset>/<stage>``. A run continues them by hard links in a work folder of its own, so that the earlier
work stays as it was. Each step can be repeated after a kill.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlcore.errors import StorageError
from rlcore.tasks.keys.cache_keys import (
    OBSERVERS,
    OUTCOME,
    E,
    Earlier,
    differences,
    explain_miss,
    key_of,
    nearest,
    setting_changes,
    without_outcome,
)
from rlcore.tasks.keys.key_inputs import key_inputs
from rlcore.tasks.kinds.kind import Continuation, Stage
from rlcore.tasks.presets.run import RunConfig
from rlcore.tasks.presets.sections import Sections
from rlcore.tasks.store.artifacts import CLEANED, ArtifactRef, ArtifactStore
from rlcore.tasks.store.cache import KeyInputs, Record, StageCache, now
from rlcore.tasks.store.locks import file_lock, is_held
from rlcore.tasks.store.settings import Home
from rlcore.tasks.store.storage import flatten, link_or_copy, matches_digest, note_digest, read_json, sync, write_json

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


CHECKPOINTS, MLFLOW_RUN = "checkpoints", "mlflow_run.json"  # in a work folder
WORK_INPUTS, _CONTINUED, _ROLLOUTS, _HISTORY = "inputs.json", "continued.json", "rollouts", "history.jsonl"
_SKIPPED = "skipped"  # batches of skipped steps, next to the checkpoints


@dataclass(frozen=True, kw_only=True)
class Work:
    """Checkpoints of an attempt in ``folder``, with its key inputs; ``ref``: the result, if it has finished.

    ``lock``: the lock file of who changes them.
    """

    folder: Path
    ingredients: KeyInputs
    created: str
    ref: ArtifactRef | None
    lock: Path

    @property
    def steps(self) -> list[int]:
        """Return the numbers of the checkpoints, the newest first."""
        return _steps(self.folder)


@dataclass(frozen=True, kw_only=True)
class Start:
    """Start of a stage that runs: from checkpoint ``step`` of ``work``, or from nothing. ``text`` tells the user."""

    text: str
    work: Work | None = None
    step: int = 0


def find_start(stage: Stage, config: RunConfig, ingredients: KeyInputs, home: Home, *, note: str = "") -> Start:
    """Return the start of a stage without a usable result. ``note``: why the record of its key does not serve.

    Work of any preset is continued if it is the same; only work of this preset explains why the stage runs.
    """
    cache, store, sections = StageCache(home.cache), ArtifactStore(home.root), stage.sections(config)
    found = [work for work in works(home) if work.ingredients["stage"]["name"] == stage.name]
    use = stage.continuation
    earlier: list[Record | Work] = [*cache.records(stage.name), *found]
    own, first = own_work(earlier, stage.name, config.name, cache), first_run(config.name, cache)
    if use is None:
        return Start(text=note or explain_miss(ingredients, own, first=first))
    bound, length = use.bound(sections.stage), int(ingredients["config"]["stage"][use.length])
    key, place = checkpoint_key(ingredients, use, sections), home.work / key_of(ingredients)
    usable = list[tuple[bool, int, Work]]()
    for work in (each for each in found if checkpoint_key(each.ingredients, use, sections) == key):
        is_own, step = work.folder == place, next((each for each in work.steps if each <= length), 0)
        if step and _is_passed(work, step, length, use, sections) and (is_own or _is_whole(work, step, store)):
            usable.append((is_own, step, work))
    if usable:
        _, step, work = max(usable, key=lambda each: each[:2])
        is_whole = step == work.ingredients["config"]["stage"][use.length]
        text = _words(step, length, is_extended=is_whole and work.folder != place)
        return Start(text=f"{text}: {note}" if note else text, work=work, step=step)
    reason, closest = note or explain_miss(ingredients, own, first=first), nearest(ingredients, own)
    if not note and closest and closest[1] == {"config": (f"stage.{use.length}",)}:
        reason += f": {bound or f'no usable checkpoint up to {length} is kept'}"
    return Start(text=f"restarts: {reason}" if (closest or note) and reason else reason)


def saved_iteration(stage: Stage, ingredients: KeyInputs, home: Home) -> str:
    """Describe the newest checkpoint of a stage that another process runs; empty if there is none yet."""
    saved, use = _steps(home.work / key_of(ingredients)), stage.continuation
    return f"iteration {saved[0]} of {ingredients['config']['stage'][use.length]} is saved" if saved and use else ""


def checkpoint_key(ingredients: KeyInputs, use: Continuation | None, sections: Sections) -> str:
    """Return the key of all work that can be continued: the stage's own, without its length if that is free."""
    ingredients = without_outcome(ingredients)
    if use is None or use.bound(sections.stage):
        return key_of(ingredients)
    config = ingredients["config"]
    stage = {name: value for name, value in config.get("stage", {}).items() if name != use.length}
    return key_of({**ingredients, "config": {**config, "stage": stage}})


def prepare_work(start: Start, work: Path, ingredients: KeyInputs, store: ArtifactStore) -> None:
    """Make the work folder of a stage, with the checkpoint that it starts from.

    Its own checkpoints that its rules do not allow go.
    """
    is_own = start.work is not None and start.work.folder == work
    if not is_own and _steps(work):
        shutil.rmtree(work)
    work.mkdir(exist_ok=True)
    if not is_own:
        (work / _CONTINUED).unlink(missing_ok=True)
    if start.work is not None and not is_own:
        _link(start.work, start.step, work, store)
    write_json({"ingredients": dict(ingredients), "created": now(), "ref": None}, work / WORK_INPUTS)


def continued(work: Path) -> tuple[list[dict[str, float]], str]:
    """Return the rows of the history, and the MLflow run, of the earlier work that a work folder continues."""
    if not (work / _CONTINUED).exists():
        return [], ""
    about = read_json(work / _CONTINUED)
    rows = _history(work, about["iteration"])
    return rows, str(about["run"])


def close_work(home: Home, preset: str, stage: Stage, key: str, ref: ArtifactRef) -> None:
    """Remove the work folder of a finished stage; its last checkpoints replace the preset's earlier ones."""
    work, kept = home.work / key, home.checkpoints / preset / stage.name
    if stage.continuation is None or not _steps(work) or not (work / WORK_INPUTS).exists():
        shutil.rmtree(work, ignore_errors=True)
        return
    write_json({**read_json(work / WORK_INPUTS), "ref": ref.to_json()}, work / WORK_INPUTS)
    for path in work.iterdir():
        if path.name not in (CHECKPOINTS, WORK_INPUTS):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    with file_lock(_kept_lock(home, kept)):
        kept.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(kept, ignore_errors=True)
        work.rename(kept)
        sync(kept.parent)


def _words(step: int, length: int, *, is_extended: bool) -> str:
    if step == length:
        return f"resumes after iteration {step} of {length}, the last"
    return f"extends from {step} to {length}" if is_extended else f"resumes at iteration {step + 1} of {length}"


def works(home: Home) -> Iterator[Work]:
    """Yield all work with checkpoints: of interrupted attempts, then of finished runs."""
    begun = {path: path.parent.with_suffix(".lock") for path in sorted(home.work.glob(f"*/{WORK_INPUTS}"))}
    kept = {path: _kept_lock(home, path.parent) for path in sorted(home.checkpoints.glob(f"*/*/{WORK_INPUTS}"))}
    for path, lock in (begun | kept).items():
        try:
            about = read_json(path)
            if _steps(path.parent):
                ref = ArtifactRef.from_json(about["ref"]) if about["ref"] else None
                found = {"ingredients": about["ingredients"], "created": about["created"]}
                yield Work(folder=path.parent, ref=ref, lock=lock, **found)
        except (StorageError, KeyError, TypeError):  # half removed by another process
            continue


def _is_passed(work: Work, step: int, length: int, use: Continuation, sections: Sections) -> bool:
    try:
        learner = read_json(_step_folder(work.folder, step) / "state.json")["learner"]
        is_stopped = use.stop(_history(work.folder, step), sections) is not None
    except (OSError, ValueError, KeyError, TypeError, StorageError):
        return False
    return not is_stopped and (step < length or not learner["num_skipped"])  # the last iteration skips no step


def _is_whole(work: Work, step: int, store: ArtifactStore) -> bool:
    """Return True if no process changes a checkpoint, and it and the rollouts before it are those that were written."""
    from rlcore.training.checkpoint import is_intact  # brings torch

    if is_held(work.lock) or not is_intact(_step_folder(work.folder, step)):
        return False
    return work.ref is None or not store.errors(work.ref)


def _link(source: Work, step: int, work: Path, store: ArtifactStore) -> None:
    """Link everything up to a checkpoint into a work folder; the checkpoint itself appears last."""
    with file_lock(source.lock, wait=False) as is_free:
        if not is_free:
            raise StorageError("another process works on this checkpoint", where=str(source.folder), fix="wait for it")
        new, old = work / ".tmp-continued", source.folder / CHECKPOINTS
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir()
        for folder in (_step_folder(source.folder, each) for each in source.steps if each <= step):
            for file in folder.iterdir():
                link_or_copy(file, new / folder.name / file.name)
        shutil.copy(old / _HISTORY, new)
        for folder in (each for each in (old / _SKIPPED).glob("*-*") if _number(each) <= step):
            shutil.copytree(folder, new / _SKIPPED / folder.name)
        rollouts = (store.path(source.ref) if source.ref else source.folder) / _ROLLOUTS
        (work / _ROLLOUTS).mkdir(exist_ok=True)
        for table in (each for each in sorted(rollouts.glob("*.parquet")) if _number(each) <= step):
            if source.ref is None and not matches_digest(table):
                raise StorageError("rollout table was modified", where=str(table), fix=f"remove {source.folder}")
            link_or_copy(table, work / _ROLLOUTS / table.name)
            note_digest(work / _ROLLOUTS / table.name)
        write_json({"iteration": step, "run": _mlflow_run(source)}, work / _CONTINUED)
        shutil.rmtree(work / CHECKPOINTS, ignore_errors=True)
        new.rename(work / CHECKPOINTS)
        sync(work)


def _kept_lock(home: Home, kept: Path) -> Path:
    return home.work / f"{CHECKPOINTS}-{kept.parent.name}-{kept.name}.lock"


def _mlflow_run(work: Work) -> str:
    if work.ref is not None:
        return work.ref.mlflow_run_id
    known = work.folder / MLFLOW_RUN
    return str(read_json(known)["run_id"]) if known.exists() else ""


def _number(path: Path) -> int:
    return int(path.stem.rpartition("-")[2])


def _history(work: Path, until: int) -> list[dict[str, float]]:
    lines = (work / CHECKPOINTS / _HISTORY).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines[:until]]


def _steps(work: Path) -> list[int]:
    found = (work / CHECKPOINTS).glob("step-*[0-9]")
    return sorted((int(path.name.removeprefix("step-")) for path in found), reverse=True)


def _step_folder(work: Path, step: int) -> Path:
    return work / CHECKPOINTS / f"step-{step:06d}"

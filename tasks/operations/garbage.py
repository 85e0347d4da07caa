"""Garbage collection of a state directory: what no registered version, no run and no preset needs goes.

Records of results stay, so that a lineage says what was cleaned. A collection holds the lock under which runs start.
While runs are active, only results and pages go, and none that was placed or used since the oldest of them began. All
steps can be repeated after a kill.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from rlcore.hardware.memory_plan import format_bytes
from rlcore.tasks.keys.cache_keys import read_by
from rlcore.tasks.keys.earlier_work import use_key, works
from rlcore.tasks.run.leases import hold_lease, startup_lock
from rlcore.tasks.run.stages import noted_result
from rlcore.tasks.steps.base import MODEL
from rlcore.tasks.store.artifacts import ArtifactStore
from rlcore.tasks.store.audit_log import record_action
from rlcore.tasks.store.cache import Record, StageCache
from rlcore.tasks.store.locks import file_lock, is_held, scratch_folder
from rlcore.tasks.store.settings import Home
from rlcore.tasks.store.shared import open_shared_store
from rlcore.tasks.tracking.database import database_of
from rlcore.tasks.tracking.lineage import Origins, is_import, read_records
from rlcore.tasks.tracking.registry import HeldVersion, clean_version, held_versions, weights_of
from rlcore.tasks.tracking.runs import Tracker, open_tracker

_UNNEEDED = "no version, run or preset needs it"
_FOLDERS = (  # written by runs alone: pattern, kind, reason
    ("checkpoints/*/*", "training checkpoint", "of a run that was not extended"),
    ("work/[!.]*", "unfinished stage", "not resumed; rejected rows may be in it"),
    ("past/*", "champion's data record", "MLflow has it"),
    ("artifacts/*/.[dt]*", "partial result", "left by a killed process"),
)


@dataclass(frozen=True)
class Waste:
    """Something that can go: its files, bytes that are elsewhere, and its removal, which returns True if it went."""

    kind: str
    reason: str
    remove: Callable[[], bool]
    paths: tuple[Path, ...] = ()
    bytes: int = 0


@dataclass(frozen=True)
class Scene:
    """State at the beginning. ``before``: seconds since 1970, what is older could go; ``kept``: results that stay."""

    home: Home
    tracker: Tracker | None
    before: float
    num_active: int
    records: Sequence[Record]
    versions: Sequence[HeldVersion]
    kept: Set[str]


@dataclass(frozen=True, kw_only=True)
class Collection:
    """Count and bytes of what went, or would go, by kind and reason; a table of it."""

    gone: Mapping[tuple[str, str], tuple[int, int]]
    text: str


def look(home: Home, *, keep_days: float) -> Collection:
    """Return what a collection would remove now. Nothing changes."""
    scene = open_scene(home, keep_days=keep_days)
    return _collection(scene, _sized(find_waste(scene)), is_removed=False)


def collect(home: Home, *, keep_days: float) -> Collection:
    """Remove what is not needed and older than ``keep_days``, or nothing if the audit log is damaged."""
    with startup_lock(home):
        scene = open_scene(home, keep_days=keep_days)
        found = _sized(find_waste(scene))
        if found:  # the log comes first: a kill leaves no removal without an entry
            removes = [[kind, *sizes] for (kind, _), sizes in _summed(found).items()]
            record_action(home, "gc", "home", {"keep_days": keep_days, "before": scene.before, "removes": removes})
        with hold_lease(home, experiment="gc"):  # by which the next start finds and removes the remains of a kill
            gone = [(waste, size) for waste, size in found if waste.remove()]
        return _collection(scene, gone, is_removed=True)


def open_scene(home: Home, *, keep_days: float) -> Scene:
    """Read what a collection needs to know. While runs are active, nothing younger than the oldest of them is old."""
    begun = [path.stat().st_mtime for path in home.leases.glob("*.json") if is_held(path)]
    before = min([time.time() - keep_days * 86_400.0, *begun])
    path = database_of(home)
    tracker = open_tracker(home) if path is None or path.is_file() else None
    versions, records = held_versions(tracker) if tracker else [], read_records(home)
    used = {each.ref.sha256 for each in records if _last_use(home, each) >= before}
    unfinished = {result.ref.sha256 for work in home.work.glob("*") if (result := noted_result(work))}
    extended = {work.ref.sha256 for work in works(home) if work.ref and (begun or _changed(work.folder) >= before)}
    staying = [each for each in versions if each.aliases or each.created >= before]
    kept = used | unfinished | extended | _behind(staying, home, records)
    return Scene(home, tracker, before, len(begun), records, versions, kept)


def _behind(versions: Sequence[HeldVersion], home: Home, records: Sequence[Record]) -> set[str]:
    """Return the results that versions were made from, up to a registered model, and what was measured on these."""
    origins, readers = Origins(records), defaultdict[str, list[Record]](list)
    for record in records:
        for sha256 in read_by(record.ingredients).values():
            readers[sha256].append(record)

    def inputs(record: Record) -> list[tuple[str, Record | None]]:
        read = {} if is_import(record) else read_by(record.ingredients)
        return [(sha256, origins.made(record, stage, sha256)) for stage, sha256 in read.items()]

    def measurements(record: Record) -> list[tuple[str, Record | None]]:
        found = [each for each in readers[record.ref.sha256] if each.ref.kind != "dataset"]
        return [(each.ref.sha256, each) for each in found if not (home.root / each.ref.uri / MODEL).exists()]

    made, found = {(each.key, each.ref.sha256): each for each in records}, {each.version.sha256 for each in versions}
    for record in filter(None, (made.get((each.stage_key, each.version.sha256)) for each in versions)):
        found |= _reached(record, inputs) | _reached(record, measurements)
    return found


def _reached(start: Record, following: Callable[[Record], list[tuple[str, Record | None]]]) -> set[str]:
    found, waiting = {start.ref.sha256}, [start]
    while waiting:
        for sha256, record in following(waiting.pop()):
            waiting += [record] if record and sha256 not in found else []
            found.add(sha256)
    return found


def _last_use(home: Home, record: Record) -> float:
    key, made = use_key(record), datetime.fromisoformat(record.created).timestamp()
    return max([made, *StageCache(home.cache).last_uses(record.ingredients["stage"]["name"], key).values()])


def find_waste(scene: Scene) -> Iterator[Waste]:
    """Yield what can go: results and pages, and what only runs write if there are none."""
    yield from _results(scene)
    shown = {sha256[:12] for sha256 in scene.kept}  # as names of pages' folders
    for folder in _old_folders(scene, "pages/*/*/*"):
        if folder.name not in shown:  # its mark goes first: without it the page is drawn again
            yield _folder(scene, "page", "its result is cleaned", folder, folder.with_suffix(".code"))
    if not scene.num_active:
        yield from _versions(scene)
        for pattern, kind, reason in _FOLDERS:
            yield from (_folder(scene, kind, reason, folder) for folder in _old_folders(scene, pattern))


def _results(scene: Scene) -> Iterator[Waste]:
    made, shared = defaultdict[str, list[Record]](list), open_shared_store()
    for record in scene.records:
        made[record.ref.sha256].append(record)
    for folder in sorted(scene.home.artifacts.glob("*/[!.]*")):
        if not folder.suffix and folder.name not in scene.kept and folder.stat().st_mtime < scene.before:
            remove = partial(_clean_result, scene, folder, made[folder.name])
            yield Waste(f"result: {folder.parent.name}", _UNNEEDED, remove, (folder,))
    for each in shared.published() if shared else ():
        _, kind, sha256 = each.uri.split("/")
        if shared and sha256 in made and sha256 not in scene.kept and each.time < scene.before:
            remove = partial(shared.clean, each, before=scene.before)  # others are for their homes to collect
            yield Waste(f"shared result: {kind}", _UNNEEDED, remove, bytes=sum(each.files.values()))


def _clean_result(scene: Scene, folder: Path, records: Sequence[Record]) -> bool:
    """Clean a result, unless a run has needed it meanwhile or is about to: it notes its uses under a stage's lock."""
    with ExitStack() as stack:
        for record in records:
            lock = scene.home.work / f"{use_key(record)}.lock"
            if not stack.enter_context(file_lock(lock, wait=False)) or _last_use(scene.home, record) >= scene.before:
                return False
        uri = folder.relative_to(scene.home.root).as_posix()
        return ArtifactStore(scene.home.root).clean(uri, before=scene.before)


def _versions(scene: Scene) -> Iterator[Waste]:
    made, tracker = {(record.key, record.ref.sha256) for record in scene.records}, scene.tracker
    for each, version in ((each, each.version) for each in scene.versions if each.has_files):
        if tracker and version.sha256 not in scene.kept and (each.stage_key, version.sha256) in made:
            remove, reason = partial(clean_version, tracker, version), "no alias, and its result is cleaned"
            yield Waste("weights of a version", reason, remove, weights_of(tracker, version))


def _folder(scene: Scene, kind: str, reason: str, folder: Path, *marks: Path) -> Waste:
    def remove() -> bool:
        is_old = _changed(folder) < scene.before
        with scratch_folder(scene.home.work) as aside:  # after a kill the next command removes it
            for path in filter(Path.exists, (*marks, folder) if is_old else ()):
                path.rename(aside / path.name)
        return is_old

    return Waste(kind, reason, remove, (*marks, folder))


def _old_folders(scene: Scene, pattern: str) -> Iterator[Path]:
    for folder in filter(Path.is_dir, sorted(scene.home.root.glob(pattern))):
        if _changed(folder) < scene.before and not any(map(is_held, folder.glob("leases/*.json"))):
            yield folder


def _changed(path: Path) -> float:
    return max(each.stat(follow_symlinks=False).st_mtime for each in (path, *path.rglob("*")))


def _sized(found: Iterable[Waste]) -> list[tuple[Waste, int]]:
    """Return each with the bytes that it frees: a file with several names counts where the last of them goes."""
    names, sized = Counter[tuple[int, int]](), []
    for waste in found:
        size = waste.bytes
        for path in [file for each in waste.paths for file in (each, *each.rglob("*")) if file.is_file()]:
            fact = path.stat(follow_symlinks=False)
            names[fact.st_dev, fact.st_ino] += 1
            size += fact.st_size * (names[fact.st_dev, fact.st_ino] == fact.st_nlink)
        sized.append((waste, size))
    return sized


def _summed(found: Iterable[tuple[Waste, int]]) -> dict[tuple[str, str], tuple[int, int]]:
    sizes = defaultdict[tuple[str, str], list[int]](list)
    for waste, size in found:
        sizes[waste.kind, waste.reason].append(size)
    return {name: (len(each), sum(each)) for name, each in sizes.items()}


def _collection(scene: Scene, found: Sequence[tuple[Waste, int]], *, is_removed: bool) -> Collection:
    rows = [(kind, *sizes, why) for (kind, why), sizes in _summed(found).items()]
    rows.append(("total", len(found), sum(size for _, size in found), ""))
    lines = [f"{'what was removed' if is_removed else 'what would be removed':<28}{'count':>7}{'size':>12}  why"]
    lines += [f"{kind:<28}{count:>7}{format_bytes(size):>12}  {why}".rstrip() for kind, count, size, why in rows]
    if not found:
        lines = [f"nothing that is older than {datetime.fromtimestamp(scene.before, UTC):%Y-%m-%d} can go"]
    lines += [f"{scene.num_active} runs are active: only older results and pages can go"] * bool(scene.num_active)
    if found and not is_removed:
        lines.append("nothing was removed; to remove it: the same command with --delete")
    return Collection(gone=_summed(found), text="\n".join(lines) + "\n")

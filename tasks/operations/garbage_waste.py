"""Waste: everything in a state directory that a collection removes, each with its own safe removal."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rlcore.errors import StorageError
from rlcore.tasks.operations.garbage_databases import old_rows, remove_old_rows
from rlcore.tasks.operations.garbage_roots import Sources, kept_results, last_use
from rlcore.tasks.pipeline.earlier_results import use_key
from rlcore.tasks.pipeline.earlier_work import works
from rlcore.tasks.store.artifacts import MANIFEST, ArtifactStore, file_sha256, listed_files
from rlcore.tasks.store.cache import Record
from rlcore.tasks.store.locks import file_lock, is_held
from rlcore.tasks.store.remote import RemoteError
from rlcore.tasks.store.scratch import scratch_folder
from rlcore.tasks.store.settings import Home
from rlcore.tasks.store.shared import Published, SharedStore, open_shared_store
from rlcore.tasks.store.storage import link_or_copy
from rlcore.tasks.tracking.database import database_of, deleted_runs
from rlcore.tasks.tracking.files import local_path
from rlcore.tasks.tracking.lineage import read_records
from rlcore.tasks.tracking.retention import HeldVersion, clean_version, erase_run, held_versions, weights_of
from rlcore.tasks.tracking.runs import Tracker, open_tracker

logger = logging.getLogger(__name__)
_DAY = 86_400.0  # seconds
_LARGE = 1 << 20  # bytes of a file that is compared
_DIGITS = 12  # characters of a digest in the name of a page's folder


@dataclass(frozen=True, kw_only=True)
class Waste:
    """Something that can go.

    Attributes:
        kind: What it is, in the singular.
        paths: Its files and folders on this machine.
        changed: When it was made or last changed, in seconds since 1970.
        reason: Why it is not needed.
        remove: Remove it, unless it is needed again; return True if it was removed. It can be repeated.
        count: Number of things.
        bytes: Size of what is not on this machine.
    """

    kind: str
    paths: tuple[Path, ...]
    changed: float
    reason: str
    remove: Callable[[], bool]
    count: int = 1
    bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Scene:
    """State of a directory at the beginning of a collection. ``kept``: results that stay, with the reasons."""

    home: Home
    tracker: Tracker | None
    before: float
    active: int
    sources: Sources
    kept: Mapping[str, str]


def open_scene(home: Home, *, keep_days: float) -> Scene:
    """Read what a collection needs to know. While runs are active, nothing younger than the oldest of them is old."""
    begun = [path.stat().st_mtime for path in home.leases.glob("*.json") if is_held(path)]
    before = min([time.time() - keep_days * _DAY, *begun])
    path = database_of(home)
    tracker = open_tracker(home) if path is None or path.is_file() else None
    versions = held_versions(tracker) if tracker else []
    continued = {work.ref.sha256 for work in works(home) if work.ref and (begun or _changed(work.folder) >= before)}
    sources = Sources(home=home, records=read_records(home), versions=versions, continued=continued)
    kept = kept_results(sources, before=before)
    return Scene(home=home, tracker=tracker, before=before, active=len(begun), sources=sources, kept=kept)


def find_waste(scene: Scene) -> Iterator[Waste]:
    """Yield what can go. The lock of a result's stage is held while it goes: a run notes its uses under this lock."""
    yield from _results(scene)
    yield from _shared_results(scene)
    yield from _pages(scene)
    if scene.active:
        return
    yield from _versions(scene)
    yield from _deleted_runs(scene)
    yield from _folders(scene)
    for rows in old_rows(scene.home, before=scene.before):
        remove = partial(remove_old_rows, scene.home, before=scene.before)
        reason = "ended long ago" if "run" in rows.kind else "older"
        yield Waste(kind=rows.kind, paths=(), changed=rows.oldest, reason=reason, remove=remove, count=rows.count)


def _results(scene: Scene) -> Iterator[Waste]:
    made: dict[str, list[Record]] = defaultdict(list)
    for record in scene.sources.records:
        made[record.ref.sha256].append(record)
    for folder in sorted(scene.home.artifacts.glob("*/*")):
        placed = folder.stat().st_mtime
        if folder.name.startswith(".") or folder.suffix or folder.name in scene.kept or placed >= scene.before:
            continue
        yield Waste(
            kind=f"result: {folder.parent.name}",
            paths=(folder,),
            changed=placed,
            reason="no version, run or preset needs it" if folder.name in made else "no record names it",
            remove=partial(_clean_result, scene, folder, made[folder.name]),
        )


def _clean_result(scene: Scene, folder: Path, records: Sequence[Record]) -> bool:
    """Clean a result, unless a run has needed it meanwhile or is about to."""
    with ExitStack() as stack:
        for record in records:
            lock = scene.home.work / f"{use_key(record)}.lock"
            if not stack.enter_context(file_lock(lock, wait=False)) or last_use(scene.home, record) >= scene.before:
                return False
        uri = folder.relative_to(scene.home.root).as_posix()
        return ArtifactStore(scene.home.root).clean(uri, before=scene.before)


def _shared_results(scene: Scene) -> Iterator[Waste]:
    """Yield results in the shared store that this home made or fetched: others are for their homes to collect.

    Another home that uses one has a copy, and its next run publishes that.
    """
    shared, known = open_shared_store(), {record.ref.sha256 for record in scene.sources.records}
    try:
        found = list(shared.published()) if shared else []
    except RemoteError as error:
        logger.warning("%s; its results were left out", error.what)
        return
    for each in found:
        _, kind, sha256 = each.uri.split("/")
        if shared and sha256 in known and sha256 not in scene.kept and each.time < scene.before:
            yield Waste(
                kind=f"shared result: {kind}",
                paths=(),
                changed=each.time,
                reason="no version, run or preset here needs it",
                remove=partial(_clean_shared, shared, each, before=scene.before),
                bytes=sum(each.files.values()),
            )


def _clean_shared(shared: SharedStore, artifact: Published, *, before: float) -> bool:
    try:
        return shared.clean(artifact, before=before)
    except RemoteError as error:
        logger.warning("%s; %s was left", error.what, artifact.uri)
        return False


def _pages(scene: Scene) -> Iterator[Waste]:
    shown = {sha256[:_DIGITS] for sha256 in scene.kept}
    for folder in sorted(scene.home.pages.glob("*/*/*")):
        if folder.is_dir() and folder.name not in shown and _is_old(scene, folder):
            mark = folder.with_suffix(".code")  # first: without it the page is drawn again
            yield _plain(scene, "page", folder, "its result is cleaned", mark, folder)


def _versions(scene: Scene) -> Iterator[Waste]:
    """Yield versions that this state directory made and that do not stay."""
    made = {(record.key, record.ref.sha256) for record in scene.sources.records}
    for each in scene.sources.versions:
        if (each.stage_key, each.version.sha256) in made and each.has_files and each.version.sha256 not in scene.kept:
            yield _version(scene, each)


def _version(scene: Scene, held: HeldVersion) -> Waste:
    assert scene.tracker is not None  # it named the version
    return Waste(
        kind="weights of a version",
        paths=weights_of(scene.tracker, held.version),
        changed=held.created,
        reason="no alias, and its result is cleaned",
        remove=partial(clean_version, scene.tracker, held.version),
    )


def _deleted_runs(scene: Scene) -> Iterator[Waste]:
    path = database_of(scene.home)
    if scene.tracker is None or path is None:
        return
    for run, (deleted, location) in deleted_runs(path, before=scene.before).items():
        yield Waste(
            kind="MLflow run",
            paths=tuple(filter(None, [local_path(location)])),
            changed=deleted,
            reason="deleted by a user",
            remove=partial(erase_run, scene.tracker, run),
        )


def _folders(scene: Scene) -> Iterator[Waste]:
    """Yield other folders and files that only runs write: there are none now."""
    home = scene.home
    for kind, reason, paths in (
        ("training checkpoint", "of a run that was not extended", home.checkpoints.glob("*/*")),
        ("unfinished stage", "not resumed; rejected rows may be in it", home.work.glob("[!.]*")),
        ("champion's data record", "MLflow has it", home.past.glob("*")),
    ):
        for path in sorted(paths):
            if path.is_dir() and _is_old(scene, path) and not any(map(is_held, path.glob("leases/*.json"))):
                yield _plain(scene, kind, path, reason, path)
    for path in sorted(home.artifacts.glob("*/.[dt]*")):
        yield _plain(scene, "partial result", path, "left by a killed process", path)
    yield from _copies(scene)


def _copies(scene: Scene) -> Iterator[Waste]:
    """Yield large files of results with the bytes of another, such as a champion's weights that a run imported."""
    found: dict[str, list[Path]] = defaultdict(list)
    for manifest in scene.home.artifacts.glob(f"*/*/{MANIFEST}"):
        with suppress(StorageError):  # a damaged one is computed again
            for name, digest in listed_files(manifest, manifest.parent.name).items():
                path = manifest.parent / name
                if manifest.parent.name in scene.kept and path.is_file() and path.stat().st_size >= _LARGE:
                    found[digest].append(path)
    for digest, paths in found.items():
        source, *others = sorted(paths, key=lambda path: path.stat().st_nlink, reverse=True)
        for path in (each for each in others if not each.samefile(source)):
            remove = partial(_share, scene, source, path, digest)
            reason = "becomes a second name of the same bytes"
            yield Waste(kind="copy", paths=(path,), changed=path.stat().st_mtime, reason=reason, remove=remove)


def _share(scene: Scene, source: Path, copy: Path, digest: str) -> bool:
    """Make a file a second name of another that has the bytes with a digest."""
    if file_sha256(source) != digest:
        return False
    with scratch_folder(scene.home.work) as aside:
        link_or_copy(source, aside / copy.name)
        (aside / copy.name).replace(copy)
    return True


def _plain(scene: Scene, kind: str, dated: Path, reason: str, *paths: Path) -> Waste:
    remove = partial(_remove, scene, dated, paths)
    return Waste(kind=kind, paths=paths, changed=_changed(dated), reason=reason, remove=remove)


def _remove(scene: Scene, dated: Path, paths: Sequence[Path]) -> bool:
    """Remove paths, unless the folder has changed meanwhile. After a kill the next command removes what is aside."""
    if not _is_old(scene, dated) and not dated.name.startswith("."):
        return False
    with scratch_folder(scene.home.work) as aside:
        for path in filter(Path.exists, paths):
            path.rename(aside / path.name)
    return True


def _is_old(scene: Scene, path: Path) -> bool:
    return _changed(path) < scene.before


def _changed(path: Path) -> float:
    """Return when something in a folder last changed."""
    return max(each.stat(follow_symlinks=False).st_mtime for each in (path, *path.rglob("*")))

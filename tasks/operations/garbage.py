"""Garbage collection of a state directory: what no registered version, no run and no preset needs goes.

Records of results stay, so that a lineage is whole and says what was cleaned. A collection holds the lock under which
runs start, so that none begins meanwhile. While runs are active, only results and pages go, and none that was placed or
used since the oldest of these runs began. All steps can be repeated after a kill.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlcore.tasks.operations.garbage_databases import compact, prefect_database
from rlcore.tasks.operations.garbage_waste import Scene, Waste, find_waste, open_scene
from rlcore.tasks.pipeline.leases import hold_lease, startup_lock
from rlcore.tasks.store.audit_log import record_action
from rlcore.tasks.store.settings import Home


@dataclass(frozen=True, kw_only=True)
class Line:
    """Line of the table: everything of one kind that goes for one reason."""

    kind: str
    count: int
    bytes: int
    oldest: float
    reason: str


@dataclass(frozen=True, kw_only=True)
class Collection:
    """Result of a collection, or of a look at what it would remove.

    Attributes:
        before: What is older could go, in seconds since 1970.
        lines: What went, or would go.
        kept: Number of results that stay, by reason.
        active: Number of active runs, because of which everything but results and pages stays.
        is_removed: True if it went.
    """

    before: float
    lines: tuple[Line, ...]
    kept: Mapping[str, int]
    active: int
    is_removed: bool


def look(home: Home, *, keep_days: float) -> Collection:
    """Return what a collection would remove now. Nothing changes."""
    scene = open_scene(home, keep_days=keep_days)
    return _collection(scene, _sized(find_waste(scene)), is_removed=False)


def collect(home: Home, *, keep_days: float) -> Collection:
    """Remove what is not needed and older than ``keep_days``; return what went.

    Raises:
        StorageError: the audit log is damaged; then nothing goes.
    """
    with startup_lock(home):
        scene = open_scene(home, keep_days=keep_days)
        found = _sized(find_waste(scene))
        if found:  # the log comes first: a kill leaves no removal without an entry
            removes = [[line.kind, line.count, line.bytes] for line in _lines(found)]
            record_action(home, "gc", "home", {"keep_days": keep_days, "before": scene.before, "removes": removes})
        with hold_lease(home, experiment="gc"):  # by which the next start finds and removes the remains of a kill
            gone = [(waste, size) for waste, size in found if waste.remove()]
            if not scene.active:
                compact(home.root / "mlflow.db")
                compact(prefect_database(home))
        return _collection(scene, gone, is_removed=True)


def _collection(scene: Scene, found: Sequence[tuple[Waste, int]], *, is_removed: bool) -> Collection:
    kept = Counter(scene.kept[path.name] for path in scene.home.artifacts.glob("*/*") if path.name in scene.kept)
    return Collection(before=scene.before, lines=_lines(found), kept=kept, active=scene.active, is_removed=is_removed)


def _lines(found: Sequence[tuple[Waste, int]]) -> tuple[Line, ...]:
    groups: dict[tuple[str, str], list[tuple[Waste, int]]] = defaultdict(list)
    for waste, size in found:
        groups[waste.kind, waste.reason].append((waste, size))
    return tuple(
        Line(
            kind=kind,
            count=sum(waste.count for waste, _ in group),
            bytes=sum(size for _, size in group),
            oldest=min(waste.changed for waste, _ in group),
            reason=reason,
        )
        for (kind, reason), group in groups.items()
    )


def _sized(found: Iterable[Waste]) -> list[tuple[Waste, int]]:
    """Return each with the bytes that it frees: a file with several names counts where the last of them goes."""
    names: Counter[tuple[int, int]] = Counter()
    sized = []
    for waste in found:
        size = waste.bytes
        for fact in [path.stat(follow_symlinks=False) for each in waste.paths for path in _files(each)]:
            names[fact.st_dev, fact.st_ino] += 1
            size += fact.st_size * (names[fact.st_dev, fact.st_ino] == fact.st_nlink)
        sized.append((waste, size))
    return sized


def _files(path: Path) -> Iterator[Path]:
    if path.is_dir():
        yield from (Path(folder, name) for folder, _, files in os.walk(path) for name in files)
    elif path.exists():
        yield path

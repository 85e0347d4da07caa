"""Results that stay: those behind registered versions, and those that a preset used a short while ago."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from rlcore.tasks.pipeline.cache_keys import read_by
from rlcore.tasks.pipeline.earlier_results import use_key
from rlcore.tasks.pipeline.stage_runs import noted_result
from rlcore.tasks.steps.base import MODEL
from rlcore.tasks.store.cache import Record, StageCache
from rlcore.tasks.store.settings import Home
from rlcore.tasks.tracking.lineage import Origins, is_import
from rlcore.tasks.tracking.retention import HeldVersion

ALIASED, YOUNG = "of a version with an alias", "of a younger version"
USED, UNFINISHED, CONTINUED = "used or made since", "of an unfinished run", "that a longer run can continue"


@dataclass(frozen=True, kw_only=True)
class Sources:
    """Records of a state directory, its registered versions, and digests of results whose checkpoints stay."""

    home: Home
    records: Sequence[Record]
    versions: Sequence[HeldVersion]
    continued: Collection[str] = ()


def kept_results(sources: Sources, *, before: float) -> dict[str, str]:
    """Return the digests of the results that stay, each with the reason. ``before``: what is older may go.

    A version stays if it has an alias or is younger, with all that it was made from up to a registered model that it
    started from, and with its measurements: evaluations, comparisons, the decision.
    """
    origins, readers = Origins(sources.records), _readers(sources.records)
    made = {(record.key, record.ref.sha256): record for record in sources.records}
    kept: dict[str, str] = {}
    staying = [version for version in sources.versions if version.aliases or version.created >= before]
    for version in sorted(staying, key=lambda each: bool(each.aliases)):
        record, found = made.get((version.stage_key, version.version.sha256)), {version.version.sha256}
        if record is not None:
            found |= _made_from(origins, record) | _measured(sources.home, readers, record)
        kept |= dict.fromkeys(found, ALIASED if version.aliases else YOUNG)
    noted = {result.ref.sha256 for work in sources.home.work.glob("*") if (result := noted_result(work))}
    others = {UNFINISHED: noted, CONTINUED: sources.continued, USED: [*_used(sources, before)]}
    return {sha256: reason for reason, found in others.items() for sha256 in found} | kept


def last_use(home: Home, record: Record) -> float:
    """Return when a run made or last needed a result, in seconds since 1970."""
    key = use_key(record)
    return max(_made(record), StageCache(home.cache).last_uses(_stage(record), key).get(key, 0.0))


def _used(sources: Sources, before: float) -> Iterator[str]:
    """Yield the digests of the results that a run made or needed since."""
    cache = StageCache(sources.home.cache)
    uses = {stage: cache.last_uses(stage) for stage in {_stage(record) for record in sources.records}}
    for record in sources.records:
        if max(_made(record), uses[_stage(record)].get(use_key(record), 0.0)) >= before:
            yield record.ref.sha256


def _made(record: Record) -> float:
    return datetime.fromisoformat(record.created).timestamp()


def _stage(record: Record) -> str:
    return str(record.ingredients["stage"]["name"])


def _made_from(origins: Origins, record: Record) -> set[str]:
    """Return the digests of everything that a result was made from; a registered model ends the search."""
    found, waiting = set[str](), [record]
    while waiting:
        each = waiting.pop()
        for stage, sha256 in () if is_import(each) else read_by(each.ingredients).items():
            made = origins.made(each, stage, sha256)
            waiting += [made] if made and sha256 not in found else []
            found.add(sha256)
    return found


def _measured(home: Home, readers: Mapping[str, Sequence[Record]], record: Record) -> set[str]:
    """Return the digests of what was measured on a result: everything that reads it and is neither model nor data."""
    found, waiting = set[str](), [record.ref.sha256]
    while waiting:
        for reader in readers.get(waiting.pop(), ()):
            ref = reader.ref
            if ref.sha256 not in found and ref.kind != "dataset" and not (home.root / ref.uri / MODEL).exists():
                found.add(ref.sha256)
                waiting.append(ref.sha256)
    return found


def _readers(records: Iterable[Record]) -> Mapping[str, list[Record]]:
    found: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        for sha256 in read_by(record.ingredients).values():
            found[sha256].append(record)
    return found

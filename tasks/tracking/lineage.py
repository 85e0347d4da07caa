"""Lineage of a model: from a version's tags through the records of stages to the digests of the raw rows.

Only the alias is read from MLflow; the rest from records in ``cache/`` and reports in ``artifacts/``. A stage without a
record here (made elsewhere, or removed) appears in the tree by its digest alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from rlcore.errors import ModelError
from rlcore.tasks.store.artifacts import ArtifactRef, ArtifactStore
from rlcore.tasks.store.cache import Record, StageCache, describe_machine
from rlcore.tasks.store.nested import flatten
from rlcore.tasks.store.settings import Home
from rlcore.tasks.store.storage import read_json
from rlcore.tasks.tracking.registry import read_version

DIGITS = 12  # digits of a digest that are shown
_LEVELS = 24  # inputs of inputs that a tree shows: a dozen retrainings, each from the champion before


@dataclass(frozen=True, kw_only=True, eq=False)
class Ancestor:
    """Result and its inputs. ``facts`` are human-readable lines; ``sha256`` is the artifact's digest."""

    stage: str
    sha256: str
    facts: tuple[str, ...]
    parents: tuple[Ancestor, ...]


_EARLIER = Ancestor(stage="earlier results:", sha256="", facts=("in the lineage of an earlier version",), parents=())


def find_lineage(home: Home, model: str) -> tuple[Mapping[str, str], Ancestor]:
    """Return the tags and the ancestry of a registered version: ``tiny-grpo@champion`` or ``tiny-grpo/3``.

    Raises:
        ModelError: no such version, or rlcore did not register it.
    """
    tags = read_version(home, model)
    records = read_records(home)
    record = record_of(tags, records)
    if record is None:
        raise ModelError(
            f"no stage of this state directory made version {tags['version']} of {tags['name']}",
            where=str(home.cache),
            fix="set RLCORE_HOME to the state directory that trained it",
        )
    return tags, ancestry(home, records, record)


def record_of(tags: Mapping[str, str], records: Iterable[Record]) -> Record | None:
    """Return the record of the stage that made a version with these tags; None: another state directory made it."""
    made = (tags.get("stage_key"), tags.get("sha256"))
    return next((each for each in records if (each.key, each.ref.sha256) == made), None)


def read_records(home: Home) -> tuple[Record, ...]:
    """Return all records of the state directory, the newest first."""
    cache = StageCache(home.cache)
    stages = sorted(folder.name for folder in home.cache.glob("*") if folder.is_dir())
    found = [record for stage in stages for record in cache.records(stage)]
    return tuple(sorted(found, key=lambda record: record.created, reverse=True))


class Origins:
    """Records of a state directory, by which the inputs of each are found."""

    def __init__(self, records: Iterable[Record]) -> None:
        self._made: dict[str, list[Record]] = defaultdict(list)
        for record in sorted(records, key=lambda each: each.created, reverse=True):
            self._made[record.ref.sha256].append(record)

    def made(self, record: Record, stage: str, sha256: str) -> Record | None:
        """Return the record of an input of ``record``: of several with that content the newest earlier one.

        If all are later, its artifact was cleaned and made again, and the oldest counts.
        """
        found = [each for each in self._made[sha256] if each.ingredients["stage"]["name"] == stage]
        return next((each for each in found if each.created <= record.created), found[-1] if found else None)

    def registered(self, record: Record) -> Record | None:
        """Return the record of the registered model that a stage imported; None if it imported none."""
        return next(iter(self._made[record.ingredients["arguments"]["sha256"]]), None) if is_import(record) else None


def ancestry(home: Home, records: Iterable[Record], record: Record) -> Ancestor:
    """Return the tree above one record, cut where it is 24 results deep: each version may descend from the one before.

    Every result is one node, however often it is an input.
    """
    origins, above, level = Origins(records), dict[str, list[Record | Ancestor]](), [record]
    for _ in range(_LEVELS):
        above |= {_name(each): _parents(origins, each) for each in level}
        found = {_name(each): each for one in level for each in above[_name(one)] if isinstance(each, Record)}
        level = [each for name, each in found.items() if name not in above]
    made = dict[str, Ancestor]()

    def node(each: Record | Ancestor) -> Ancestor:
        if isinstance(each, Ancestor):
            return each
        name = _name(each)
        if name not in made:
            made[name] = _EARLIER  # for content that is its own input
            parents = tuple(map(node, above.get(name, [_EARLIER])))
            stage, facts = each.ingredients["stage"]["name"], _facts(home, each)
            made[name] = Ancestor(stage=stage, sha256=each.ref.sha256, facts=facts, parents=parents)
        return made[name]

    return node(record)


def _name(record: Record) -> str:
    return f"{record.key}.{record.ref.sha256}"  # a key can have results of several digests, of which one exists


def _parents(origins: Origins, record: Record) -> list[Record | Ancestor]:
    registered, inputs = origins.registered(record), record.ingredients["inputs"].items()
    made = (origins.made(record, stage, sha256) or _unknown(stage, sha256) for stage, sha256 in inputs)
    return [*([registered] if registered else []), *made]


@cache
def _unknown(stage: str, sha256: str) -> Ancestor:
    return Ancestor(stage=stage, sha256=sha256, facts=("no record in this state directory",), parents=())


def nodes(root: Ancestor) -> Iterator[Ancestor]:
    """Yield the results of a tree once each, the nearest first."""
    seen, level = dict.fromkeys([root, _EARLIER]), [root]
    while level:
        yield from level
        level = list(dict.fromkeys(parent for node in level for parent in node.parents if parent not in seen))
        seen |= dict.fromkeys(level)


def is_import(record: Record) -> bool:
    """Return True if a stage imported a registered model instead of making one."""
    return "uri" in record.ingredients["arguments"]


def tree_text(tags: Mapping[str, str], root: Ancestor) -> str:
    """Format the tree for a terminal; each result is expanded once."""
    names = (
        "sha256",
        "preset",
        "code",
        "data",
        "parents",
        "versions",
        "environment",
        "machine",
        "promoted_over",
        "verdict",
        "rolled_back",
        "cleaned",
    )
    lines = [f"{tags['name']} version {tags['version']}"]
    lines += [f"  {name}: {tags[name]}" for name in names if tags.get(name)]
    lines += tree_lines(root)
    return "\n".join(lines) + "\n"


def tree_lines(root: Ancestor) -> list[str]:
    """Format the tree alone."""
    return _tree_lines(root, "", set())


def _facts(home: Home, record: Record) -> tuple[str, ...]:
    ingredients, ref = record.ingredients, record.ref
    facts = [
        f"{ref.rows} {'iteration' if ref.kind == 'policy' else 'row'}{'s' * (ref.rows != 1)}" if ref.rows else "",
        *(f"source {digest[:DIGITS]}" for digest in list(flatten(ingredients["external"]).values())[:1] if digest),
    ]
    absent = ArtifactStore(home.root).absence(ref)
    facts += [*_rows_of(home, ref), describe_machine(ingredients.get("machine", {})), absent]
    return tuple(fact for fact in (*facts, f"seed {ingredients['seed']}", record.created[:16]) if fact)


def _rows_of(home: Home, ref: ArtifactRef) -> list[str]:
    path = ArtifactStore(home.root).report_path(ref)
    if not path.is_file() or not path.stat().st_size:
        return []
    report = read_json(path)
    return [f"{report['contract']} from {report['source']}", f"rows' digest {report['digest'][:DIGITS]}"]


def _tree_lines(node: Ancestor, indent: str, shown: set[Ancestor]) -> list[str]:
    again = node in shown and bool(node.parents)
    shown.add(node)
    facts = "as above" if again else ", ".join(node.facts)
    lines = [f"{indent}{node.stage} {node.sha256[:DIGITS]}  {facts}"]
    for parent in () if again else node.parents:
        lines += _tree_lines(parent, indent + "    ", shown)
    return lines

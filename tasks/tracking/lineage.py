"""Lineage of a model: from a version's tags through the records of stages to the digests of the raw rows.

Only the alias is read from MLflow; the rest from records in ``cache/`` and reports in ``artifacts/``. A stage without a
record here (made elsewhere, or removed) appears in the tree by its digest alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rlcore.errors import ModelError
from rlcore.tasks.store.artifacts import ArtifactRef
from rlcore.tasks.store.cache import Record, StageCache, describe_machine
from rlcore.tasks.store.nested import flatten
from rlcore.tasks.store.settings import Home
from rlcore.tasks.store.storage import read_json
from rlcore.tasks.tracking.registry import read_version

DIGITS = 12  # digits of a digest that are shown


@dataclass(frozen=True, kw_only=True)
class Ancestor:
    """Result and its inputs. ``facts`` are human-readable lines; ``sha256`` is the artifact's digest."""

    stage: str
    sha256: str
    facts: tuple[str, ...]
    parents: tuple[Ancestor, ...]


def find_lineage(home: Home, model: str) -> tuple[Mapping[str, str], Ancestor]:
    """Return the tags and the ancestry of a registered version: ``tiny-grpo@champion`` or ``tiny-grpo/3``.

    Raises:
        ModelError: no such version, or rlcore did not register it.
    """
    tags = read_version(home, model)
    records = read_records(home)
    record = next((each for each in records if each.key == tags.get("stage_key")), None)
    if record is None:
        raise ModelError(
            f"no stage of this state directory made version {tags['version']} of {tags['name']}",
            where=str(home.cache),
            fix="set RLCORE_HOME to the state directory that trained it",
        )
    return tags, ancestry(home, records, record)


def read_records(home: Home) -> tuple[Record, ...]:
    """Return all records of the state directory, the newest first."""
    cache = StageCache(home.cache)
    stages = sorted(folder.name for folder in home.cache.glob("*") if folder.is_dir())
    found = [record for stage in stages for record in cache.records(stage)]
    return tuple(sorted(found, key=lambda record: record.created, reverse=True))


def ancestry(home: Home, records: tuple[Record, ...], record: Record) -> Ancestor:
    """Return the tree above one record; of several records with the same content the newest earlier one counts."""
    # for an import from the registry: the origin of the registered artifact
    registered = record.ingredients["arguments"]["sha256"] if is_import(record) else None
    made_it = (each for each in records if each.ref.sha256 == registered)
    parents = [ancestry(home, records, each) for each in made_it][:1]
    for stage, sha256 in record.ingredients["inputs"].items():
        made = [
            each
            for each in records
            if each.ingredients["stage"]["name"] == stage
            and each.ref.sha256 == sha256
            and each.created <= record.created
        ]
        unknown = Ancestor(stage=stage, sha256=sha256, facts=("no record in this state directory",), parents=())
        parents.append(ancestry(home, records, made[0]) if made else unknown)
    stage = record.ingredients["stage"]["name"]
    return Ancestor(stage=stage, sha256=record.ref.sha256, facts=_facts(home, record), parents=tuple(parents))


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
    )
    lines = [f"{tags['name']} version {tags['version']}"]
    lines += [f"  {name}: {tags[name]}" for name in names if tags.get(name)]
    lines += tree_lines(root)
    return "\n".join(lines) + "\n"


def tree_lines(root: Ancestor) -> list[str]:
    """Format the tree alone, a line for each ancestor."""
    return _tree_lines(root, "", set())


def _facts(home: Home, record: Record) -> tuple[str, ...]:
    ingredients, ref = record.ingredients, record.ref
    facts = [
        f"{ref.rows} {'iterations' if ref.kind == 'policy' else 'rows'}" if ref.rows else "",
        *(f"source {digest[:DIGITS]}" for digest in list(flatten(ingredients["external"]).values())[:1] if digest),
    ]
    facts += [*_rows_of(home, ref), describe_machine(ingredients.get("machine", {}))]
    return tuple(fact for fact in (*facts, f"seed {ingredients['seed']}", record.created[:16]) if fact)


def _rows_of(home: Home, ref: ArtifactRef) -> list[str]:
    path = home.root / ref.uri / "report.json"
    if not path.is_file():
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

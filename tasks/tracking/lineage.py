"""Lineage of a model: from a version's tags through the records of stages to the digests of the raw rows.

Only the alias is read from MLflow; the rest from records in ``cache/`` and reports in ``artifacts/``. A stage without a
record here (made elsewhere, or removed) appears in the tree by its digest alone.

A version's files in MLflow have a folder ``past`` with its inputs, so that later data can be compared without the state
directory. ``past.json`` has the nearest artifact of each stage, the recipe's digest, and digests of the other files:
each dataset has ``<artifact>/report.json`` with the digest and the sketches of its rows, and preference pairs also
``<artifact>/prompts.parquet`` with hashes of the training prompts. The digest of ``past.json`` is a tag of the version,
so that no damaged record is used.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcore.errors import ModelError, StorageError
from rlcore.tasks.store.artifacts import REPORT, ArtifactRef, ArtifactStore, file_errors
from rlcore.tasks.store.cache import Record, StageCache, describe_machine
from rlcore.tasks.store.locks import scratch_folder
from rlcore.tasks.store.settings import Home
from rlcore.tasks.store.storage import (
    file_sha256,
    flatten,
    link_or_copy,
    read_column,
    read_json,
    write_json,
    write_table,
)
from rlcore.tasks.tracking.mlflow_model import PAST
from rlcore.tasks.tracking.registry import ModelVersion, read_tags, read_version, set_tags
from rlcore.tasks.tracking.runs import Tracker

if TYPE_CHECKING:
    import pandas as pd

DIGITS = 12  # digits of a digest that are shown
PROMPTS = "prompts.parquet"
SEEN_DIGITS = 16
"""Hexadecimal digits of a training prompt's hash: 64 bits distinguish prompts."""
_RECORD = "past.json"
_FORMAT = 1
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
        ModelError: as :func:`find_record`.
    """
    tags, records, record = find_record(home, model)
    return tags, ancestry(home, records, record)


def find_record(home: Home, model: str) -> tuple[Mapping[str, str], tuple[Record, ...], Record]:
    """Return the tags of a registered version, all records, and that of the stage which made the version.

    Raises:
        ModelError: no such version, or no stage of this state directory made it.
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
    return tags, records, record


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
    made = ("sha256", "preset", "code", "data", "parents", "versions", "environment", "machine")
    names = (*made, "promoted_over", "verdict", "rolled_back", "cleaned")
    lines = [f"{tags['name']} version {tags['version']}"]
    lines += [f"  {name}: {tags[name]}" for name in names if tags.get(name)]
    lines += tree_lines(root)
    return "\n".join(lines) + "\n"


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


def tree_lines(node: Ancestor, indent: str = "", shown: set[Ancestor] | None = None) -> list[str]:
    """Format the tree alone."""
    shown = set() if shown is None else shown
    again = node in shown and bool(node.parents)
    shown.add(node)
    facts = "as above" if again else ", ".join(node.facts)
    lines = [f"{indent}{node.stage} {node.sha256[:DIGITS]}  {facts}"]
    for parent in () if again else node.parents:
        lines += tree_lines(parent, indent + "    ", shown)
    return lines


@dataclass(frozen=True, kw_only=True)
class ChampionLineage:
    """Inputs of a version: the nearest artifact of each stage by its name, and the digest of its recipe.

    ``datasets``: artifacts with stored sketches; ``paired``: those of preference pairs, with stored prompts.
    """

    artifacts: Mapping[str, str]
    recipe: str
    datasets: Mapping[str, str] = field(default_factory=dict)
    paired: tuple[str, ...] = ()


def note_past(home: Home, records: tuple[Record, ...], record: Record, folder: Path, *, recipe: str) -> str:
    """Write the known inputs of a stage's result into ``folder``; return the record's digest."""
    artifacts = nearest(ancestry(home, records, record))
    kept, paired = dict[str, str](), list[str]()
    for name, sha256 in sorted(artifacts.items()):
        snapshot = home.artifacts / "dataset" / sha256
        report = read_json(snapshot / REPORT) if (snapshot / REPORT).is_file() else {}
        if "sketches" not in report:
            continue
        kept[name] = sha256
        write_json({each: report[each] for each in ("digest", "sketches")}, folder / sha256 / REPORT)
        if report.get("contract", "").startswith("preference_pairs/"):
            paired.append(sha256)
            write_table(_prompts_of(snapshot), folder / sha256 / PROMPTS)
    past = ChampionLineage(artifacts=artifacts, recipe=recipe, datasets=kept, paired=tuple(paired))
    files = {path.relative_to(folder).as_posix(): file_sha256(path) for path in _files(folder)}
    write_json({"format": _FORMAT, **asdict(past), "files": files}, folder / _RECORD)
    return file_sha256(folder / _RECORD)


def _prompts_of(snapshot: Path) -> pd.DataFrame:
    import pandas as pd  # by a run that registers a model

    from rlcore.data_contracts.text import prompt_hash

    columns = read_column(snapshot / "train.parquet", "messages")
    found = {prompt_hash(messages)[:SEEN_DIGITS] for some in columns for messages in some}
    return pd.DataFrame({"prompt": sorted(found)})


def nearest(root: Ancestor) -> dict[str, str]:
    """Return the artifact of each stage that is the fewest steps above ``root``, by the stage's name."""
    found: dict[str, str] = {}
    for node in nodes(root):
        found.setdefault(node.stage, node.sha256)
    return found


def add_past(tracker: Tracker, version: ModelVersion, folder: Path, digest: str) -> None:
    """Add a record to a version that has none, or a damaged one. ``folder``: a folder named ``past``."""
    tracker.client.log_model_artifacts(version.model_id, str(folder.parent))
    set_tags(tracker, version, {PAST: digest})


def read_past(home: Home, tracker: Tracker, version: ModelVersion) -> ChampionLineage:
    """Download the record of a version into the folder ``past``, by the digests of its datasets, and return it.

    Raises:
        StorageError: it is missing or damaged.
    """
    digest = read_tags(tracker, version).get(PAST)
    if digest is None:
        raise StorageError("it has none")
    with scratch_folder(home.work) as temporary:
        return _taken_up(home, _downloaded(version, temporary), digest)


def _downloaded(version: ModelVersion, folder: Path) -> Path:
    from mlflow.artifacts import download_artifacts
    from mlflow.exceptions import MlflowException

    uri = f"models:/{version.name}/{version.version}/{PAST}"
    try:
        return Path(download_artifacts(artifact_uri=uri, dst_path=str(folder)))
    except (MlflowException, OSError) as error:
        raise StorageError(f"MLflow has no such files: {error}") from error


def _taken_up(home: Home, folder: Path, digest: str) -> ChampionLineage:
    record = folder / _RECORD
    if not record.is_file() or file_sha256(record) != digest:
        raise StorageError(f"{_RECORD} is damaged or missing")
    values: dict[str, Any] = read_json(record)
    if values.pop("format") != _FORMAT:
        raise StorageError(f"{_RECORD} was written by a newer rlcore")
    if errors := file_errors(folder, {**values.pop("files"), _RECORD: digest}):
        raise StorageError("; ".join(errors[:4]))
    for path in _files(folder):
        link_or_copy(path, home.past / path.relative_to(folder))
    return ChampionLineage(**{**values, "paired": tuple(values["paired"])})


def _files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.glob("*/*")) if path.is_file()]

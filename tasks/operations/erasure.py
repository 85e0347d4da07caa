"""Erasure of rows from a state directory: search all places, remove or redact them, and let the gate drop the rows.

Tables and documents with a quote of a row are removed, lines of logs too; gates' reports and cells of databases are
redacted. Records stay. A file ``ERASED`` marks the artifacts whose files were removed. Snapshots are removed last, so
that the repeat of a killed erasure still knows the texts to search.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from rlcore.data_contracts.gate.denied import DIGITS
from rlcore.data_contracts.text import normalise, prompt_hash
from rlcore.tasks.operations.database_texts import count_quotes, open_databases, redact
from rlcore.tasks.operations.quotes import REDACTED, Quotes, quotes_of, redacted, reduced, strings_in
from rlcore.tasks.operations.rows import Holding, descending
from rlcore.tasks.operations.wanted_rows import IDS, WantedRows
from rlcore.tasks.store.artifacts import ERASED, REPORT
from rlcore.tasks.store.cache import Record
from rlcore.tasks.store.settings import Home
from rlcore.tasks.store.storage import read_json, write_bytes, write_json

_SNAPSHOTS = ("artifacts", "dataset")
_APART = {"rows", "erasures", "leases"}  # folders without texts
_NO_TEXTS = {"audit.jsonl", "erased.jsonl"}
_CHECKPOINT = {"model", "tokenizer"}  # folders whose files are the weights' own
_NAMES = ("word", "task", "source")  # sketches that count names of rows
_HEAD = 8192  # bytes by which a binary file is known
Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Erasure:
    """Rows to erase: their ``prompts`` by hash, what identifies them elsewhere, and the artifacts made from them.

    ``asked``: the last turns of the prompts, normalized, and ``ids`` of the rows, which tables without conversations
    have. ``quotes``: of all their texts. ``lines``: digests of their lines, which quarantines have. ``snapshots``:
    digests of the rows of the snapshots that hold them, as gates' reports have them.
    """

    prompts: frozenset[str]
    asked: frozenset[str]
    ids: frozenset[str]
    quotes: Quotes
    lines: frozenset[str]
    snapshots: frozenset[str]
    artifacts: frozenset[str]


def erasure_of(home: Home, records: Sequence[Record], wanted: WantedRows, holdings: Sequence[Holding]) -> Erasure:
    """Return the erasure of the wanted rows: their own texts, those of their snapshots, and none of rows that stay."""
    prompts = {each for found in wanted.prompts.values() for each in found}
    prompts |= {each for holding in holdings for each in holding.prompts}
    texts, asked, ids = {*wanted.texts}, set[str](), set[str]()
    for rows in _snapshot_rows(home, [each.sha256 for each in holdings]):
        held = [row for row in rows if _hash(row) in prompts]
        texts |= {text for row in held for text in strings_in(row)}
        asked |= {_last_turn(row) for row in held}
        ids |= {row[name] for row in held for name in IDS if name in row}
    quotes = quotes_of(texts).without(_kept_texts(home, prompts, asked))
    places = [home.artifacts / "dataset" / each.sha256 for each in holdings]
    reports = [each for place in places for each in (place / REPORT, place.with_name(f"{place.name}.cleaned"))]
    return Erasure(
        prompts=frozenset(prompts),
        asked=frozenset(asked),
        ids=frozenset(ids),
        quotes=quotes,
        lines=wanted.digests,
        snapshots=frozenset(str(read_json(path)["digest"]) for path in filter(_is_report, reports)),
        artifacts=descending(records, [each.sha256 for each in holdings]),
    )


def write_erasure(erasure: Erasure, path: Path) -> None:
    """Write an erasure, with texts, until it is complete: later the rows that stay may be gone, with which it began."""
    quotes = erasure.quotes
    found = {"windows": quotes.windows.tolist(), "short": sorted(quotes.short), "words": sorted(quotes.words)}
    others = {each.name: sorted(getattr(erasure, each.name)) for each in fields(Erasure) if each.name != "quotes"}
    write_json({**others, "quotes": found}, path)


def read_erasure(path: Path) -> Erasure:
    """Read an erasure that was killed."""
    found = read_json(path)
    windows, words = found["quotes"].pop("windows"), found.pop("quotes")
    quotes = Quotes(windows=np.array(windows, dtype=np.uint64), **{name: frozenset(words[name]) for name in words})
    return Erasure(quotes=quotes, **{name: frozenset(values) for name, values in found.items()})


def search(home: Home, erasure: Erasure) -> dict[str, int]:
    """Return the number of rows, lines, cells or files to erase, by place in the state directory."""
    found = {folder.relative_to(home.root).as_posix(): 1 for folder in _unfinished(home, erasure)}
    files = {path.relative_to(home.root).as_posix(): _count(path, erasure) for path in _files(home)}
    found |= {name: count for name, count in files.items() if count}
    for name, engine in open_databases(home):
        found |= {f"{name}: {cell}": count for cell, count in count_quotes(engine, erasure.quotes).items()}
    return found


def remove(home: Home, erasure: Erasure) -> None:
    """Remove or redact everything that :func:`search` finds, snapshots last."""
    for folder in list(_unfinished(home, erasure)):
        shutil.rmtree(folder)
    for _, engine in open_databases(home):
        redact(engine, erasure.quotes)
    files = sorted(_files(home), key=lambda path: path.relative_to(home.root).parts[:2] == _SNAPSHOTS)
    for path in files:
        if _count(path, erasure):
            _remove(home, path, erasure)


def redacted_report(report: dict[str, Any], erasure: Erasure) -> dict[str, Any]:
    """Return a gate's report without quotes, and without the names in its sketches that only erased rows have."""
    found: dict[str, Any] = redacted(report, erasure.quotes)
    if found.get("digest") in erasure.snapshots:
        sketches = found.get("sketches", {})
        for sketch in (sketches[name] for name in _NAMES if name in sketches):
            sketch["counts"] = _without_names(sketch["counts"], erasure.quotes)
    return found


def _without_names(counts: Mapping[str, float], quotes: Quotes) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, count in counts.items():
        shown = REDACTED if {*reduced(name).split()} & quotes.words else name
        found[shown] = found.get(shown, 0) + count
    return found


def _remove(home: Home, path: Path, erasure: Erasure) -> None:
    if _is_report(path):
        write_json(redacted_report(read_json(path), erasure), path)
    elif path.suffix == ".log":
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
        kept = "".join(line for line in lines if not erasure.quotes.are_in(line))
        # in place: a service has the file open
        path.write_text("" if erasure.quotes.are_in(kept) else kept, encoding="utf-8")
    else:
        parts = path.relative_to(home.root).parts
        if parts[0] == "artifacts":
            write_bytes(b"", home.root.joinpath(*parts[:3], ERASED))
        path.unlink()


def _files(home: Home) -> Iterator[Path]:
    """Yield all files of a state directory that may have texts."""
    for path in sorted(home.root.rglob("*")):
        parts = path.relative_to(home.root).parts
        is_apart = parts[0] in _APART or parts[:2] == ("services", "postgres") or path.parent.name in _CHECKPOINT
        if not is_apart and path.is_file() and path.name not in _NO_TEXTS and ".db" not in path.suffixes[-1:]:
            yield path


def _unfinished(home: Home, erasure: Erasure) -> Iterator[Path]:
    """Yield the folders of attempts and checkpoints that read one of the artifacts: they have rows as tokens."""
    for about in (*home.work.glob("*/inputs.json"), *home.checkpoints.glob("*/*/inputs.json")):
        if {*read_json(about)["ingredients"]["inputs"].values()} & erasure.artifacts:
            yield about.parent


def _count(path: Path, erasure: Erasure) -> int:
    if path.suffix == ".parquet":
        return _count_rows(path, erasure)
    with path.open("rb") as file:
        if b"\0" in file.read(_HEAD):
            return 0
    if _is_report(path):
        report = read_json(path)
        return int(redacted_report(report, erasure) != report)
    text = path.read_text(encoding="utf-8", errors="replace")
    if path.name == "quarantine.jsonl" and (listed := sum(line in text for line in erasure.lines)):
        return listed
    return max(1, sum(map(erasure.quotes.are_in, text.splitlines()))) if erasure.quotes.are_in(text) else 0


def _count_rows(path: Path, erasure: Erasure) -> int:
    """Count the rows to erase in a table; a damaged one, of which nothing can be told, counts as one."""
    import pyarrow as pa

    found = 0
    try:
        for rows in _rows(path):
            are_quoting = erasure.quotes.are_in("\n".join(strings_in(rows)))
            found += sum(
                _is_named(row, erasure) or (are_quoting and erasure.quotes.are_in("\n".join(strings_in(row))))
                for row in rows
            )
    except (pa.ArrowInvalid, OSError):
        return 1
    return found


def _is_named(row: Row, erasure: Erasure) -> bool:
    """Return True if a row of a table is one of the erased rows, or about one."""
    if "messages" in row:
        return _hash(row) in erasure.prompts
    is_about = any(row.get(name) in erasure.ids for name in IDS)
    return is_about or any(normalise(text) in erasure.asked for text in strings_in(row))


def _rows(table: Path) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of a table in batches, without columns of numbers."""
    import pyarrow.parquet as pq

    with table.open("rb") as file:
        opened = pq.ParquetFile(file)
        columns = [field.name for field in opened.schema_arrow if _has_text(field.type)]
        for batch in opened.iter_batches(columns=columns, batch_size=1024):
            yield batch.to_pylist()


def _has_text(kind: Any) -> bool:
    import pyarrow as pa

    if pa.types.is_dictionary(kind):
        return _has_text(kind.value_type)
    inner = [kind.field(place).type for place in range(kind.num_fields)]
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or any(map(_has_text, inner))


def _snapshot_rows(home: Home, names: Sequence[str]) -> Iterator[list[dict[str, Any]]]:
    for table in sorted(table for name in names for table in home.artifacts.glob(f"dataset/{name}/*.parquet")):
        yield from _rows(table)


def _kept_texts(home: Home, prompts: set[str], asked: set[str]) -> Iterator[list[str]]:
    """Yield the texts of the rows that stay; what they ask is removed from ``asked``."""
    for rows in _snapshot_rows(home, ["*"]):
        kept = [row for row in rows if _hash(row) not in prompts]
        asked.difference_update(map(_last_turn, kept))
        yield [text for row in kept for text in strings_in(row)]


def _hash(row: Row) -> str:
    return prompt_hash(row["messages"])[:DIGITS]


def _last_turn(row: Row) -> str:
    return normalise(row["messages"][-1]["content"])


def _is_report(path: Path) -> bool:
    """Return True for the report of a data gate, of which the counts stay, also when its dataset was cleaned."""
    return path.is_file() and (path.name == REPORT or (path.suffix == ".cleaned" and path.stat().st_size > 0))

"""Rows in dataset snapshots, and the models that descend from them.

Two rows are the same if their prompts are: the turns up to the user's last one without system prompts, compared as the
gate divides rows (:func:`prompt_hash`: NFKC, no case, blanks collapsed). Answers do not count: a row with another
answer to the prompt is the same row here. Quarantined rows, of which a snapshot has no text, are found by the digest of
their line. ``rows/<artifact>.npy`` remembers the hashes of a snapshot's rows, also after its tables are removed.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlcore.data_contracts.gate.denied import DIGITS
from rlcore.data_contracts.text import prompt_hash
from rlcore.errors import StorageError
from rlcore.tasks.operations.wanted_rows import IDS, WantedRows
from rlcore.tasks.pipeline.cache_keys import read_by
from rlcore.tasks.store.cache import Record
from rlcore.tasks.store.settings import Home
from rlcore.tasks.store.storage import read_column, write_bytes
from rlcore.tasks.tracking.lineage import is_import
from rlcore.tasks.tracking.runs import Tracker

SPLITS = ("train", "eval")
_ENTRY = np.dtype([("prompt", "<u8"), ("name", "<u8"), ("side", "u1")])
_VERSIONS_PER_CALL = 200
Index = NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Holding:
    """Snapshot that holds wanted rows: their numbers by side, its stages and presets, and versions that descend.

    ``lines``: those of the file. ``prompts``: hashes of the rows that were found.
    """

    sha256: str
    lines: tuple[int, ...]
    stages: tuple[str, ...]
    presets: tuple[str, ...]
    train: int
    held_out: int
    quarantined: int
    models: tuple[str, ...]
    prompts: frozenset[str]


def find_holdings(
    home: Home, records: Sequence[Record], wanted: WantedRows, versions: Iterable[Mapping[str, str]]
) -> tuple[Holding, ...]:
    """Return the snapshots that hold wanted rows.

    ``versions``: from :func:`registered_versions`.
    """
    prompts = np.array(sorted({int(each, 16) for found in wanted.prompts.values() for each in found}), dtype=np.uint64)
    names = np.array(sorted({_name(each) for each in wanted.ids.values()}), dtype=np.uint64)
    versions, made = list(versions), {each.ref.sha256 for each in records if each.ref.kind == "dataset"}
    found = []
    for sha256 in sorted({*made, *(path.stem for path in (home.root / "rows").glob("*.npy"))}):
        index = index_of(home, sha256)
        rows = index[np.isin(index["prompt"], prompts) | np.isin(index["name"], names)]
        quarantined = _num_quarantined(home.artifacts / "dataset" / sha256, wanted)
        if not len(rows) and not quarantined:
            continue
        own, held = [each for each in records if each.ref.sha256 == sha256], _held_lines(wanted, rows)
        below = descending(records, [sha256])
        found.append(
            Holding(
                sha256=sha256,
                lines=held,
                stages=tuple(sorted({each.ingredients["stage"]["name"] for each in own})),
                presets=tuple(sorted({preset for each in own for preset in _presets(home, each)})),
                train=int((rows["side"] == 0).sum()),
                held_out=int((rows["side"] == 1).sum()),
                quarantined=quarantined,
                models=tuple(f"{each['name']}/{each['version']}" for each in versions if each.get("sha256") in below),
                prompts=frozenset(f"{each:016x}" for each in rows["prompt"].tolist()),
            )
        )
    return tuple(found)


def index_of(home: Home, sha256: str) -> Index:
    """Return prompt, id and side of each row of a snapshot as numbers, remembered by its digest."""
    path, folder = _index_path(home, sha256), home.artifacts / "dataset" / sha256
    if path.is_file():
        known: Index = np.load(path)
        return known
    entries = [
        (int(prompt_hash(messages)[:DIGITS], 16), _name(name), side)
        for side, split in enumerate(SPLITS)
        for messages, name in _columns(folder / f"{split}.parquet")
    ]
    index = np.array(entries, dtype=_ENTRY)
    if all((folder / f"{split}.parquet").is_file() for split in SPLITS):
        _write_index(path, index)
    return index


def remember(home: Home, sha256: str) -> None:
    """Write the index of a snapshot that is about to be cleaned; a damaged one has no rows that could be found."""
    import pyarrow as pa

    with suppress(StorageError, pa.ArrowInvalid):
        index_of(home, sha256)


def forget(home: Home, sha256: str, prompts: Iterable[str]) -> None:
    """Remove rows with these prompts from what is remembered of a snapshot; other rows can still be found."""
    index = index_of(home, sha256)
    gone = np.isin(index["prompt"], np.array([int(each, 16) for each in prompts], dtype=np.uint64))
    _write_index(_index_path(home, sha256), index[~gone])


def _index_path(home: Home, sha256: str) -> Path:
    return home.root / "rows" / f"{sha256}.npy"


def _write_index(path: Path, index: Index) -> None:
    content = io.BytesIO()
    np.save(content, index)
    write_bytes(content.getvalue(), path)


def registered_versions(tracker: Tracker) -> Iterator[Mapping[str, str]]:
    """Yield the tags of all registered versions, with ``name`` and ``version``."""
    token: str | None = None
    while True:
        page = tracker.client.search_model_versions(max_results=_VERSIONS_PER_CALL, page_token=token)
        yield from ({**each.tags, "name": each.name, "version": str(each.version)} for each in page)
        token = page.token
        if not token:
            return


def descending(records: Iterable[Record], artifacts: Iterable[str]) -> frozenset[str]:
    """Return artifacts with all that were made from them, by the records of stages."""
    found, oldest_first = {*artifacts}, sorted(records, key=lambda each: each.created)
    for record in oldest_first:
        read = {*read_by(record.ingredients).values()}
        read |= {record.ingredients["arguments"]["sha256"]} if is_import(record) else set()
        if read & found:
            found.add(record.ref.sha256)
    return frozenset(found)


def lines_about(wanted: WantedRows, holdings: Sequence[Holding]) -> Iterator[str]:
    """Yield lines for a terminal: each snapshot with its rows, presets and models, and the number of lines found."""
    for each in holdings:
        yield f"{', '.join(each.stages)} {each.sha256[:12]} (presets: {', '.join(each.presets) or 'none'})"
        yield f"  train {each.train}, held out {each.held_out}, quarantined {each.quarantined}"
        yield f"  lines of the file: {', '.join(map(str, each.lines)) or 'none'}"
        yield f"  models: {', '.join(each.models) or 'none'}"
    found = {line for each in holdings for line in each.lines}
    yield f"in snapshots: {len(found)} of {wanted.num_lines} lines"


def _held_lines(wanted: WantedRows, rows: Index) -> tuple[int, ...]:
    """Return the lines of the file whose rows are among these rows of an index."""
    prompts, names = {*rows["prompt"].tolist()}, {*rows["name"].tolist()}
    found = {line for line, hashes in wanted.prompts.items() if any(int(each, 16) in prompts for each in hashes)}
    return tuple(sorted(found | {line for line, name in wanted.ids.items() if _name(name) in names}))


def _num_quarantined(folder: Path, wanted: WantedRows) -> int:
    path = folder / "quarantine.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return sum(json.loads(line)["digest"] in wanted.digests for line in lines)


def _presets(home: Home, record: Record) -> Iterator[str]:
    """Yield the presets whose runs needed the result of a record."""
    uses = (home.cache / record.ingredients["stage"]["name"]).glob(f"*/{record.key}")
    yield from (path.parent.name for path in uses)


def _columns(table: Path) -> Iterator[tuple[Any, str]]:
    """Yield conversation and id of each row of a snapshot's table; none if it was removed."""
    if not table.is_file():
        return
    import pyarrow.parquet as pq

    name = next(each for each in IDS if each in pq.read_schema(table).names)
    columns = (read_column(table, "messages"), read_column(table, name))
    for messages, names in zip(*columns, strict=True):
        yield from zip(messages, names, strict=True)


def _name(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8])

"""Registered models that descend from the dataset snapshots with given rows.

Two rows are the same if their prompts are: the turns up to the user's last one without system prompts, compared as the
gate divides rows (:func:`prompt_hash`: NFKC, no case, blanks collapsed). Answers do not count.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlcore.data_contracts.adapters.convert import COLUMNS, stream_of
from rlcore.data_contracts.adapters.expressions import Kind
from rlcore.data_contracts.errors import ContractError
from rlcore.data_contracts.gate.reading import Source, read_source
from rlcore.data_contracts.gate.records import SourceRow
from rlcore.data_contracts.text import prompt_hash
from rlcore.errors import DataError
from rlcore.tasks.keys.cache_keys import read_by
from rlcore.tasks.steps.data_source import contract_errors
from rlcore.tasks.store.cache import Record
from rlcore.tasks.store.settings import Home
from rlcore.tasks.store.storage import read_column
from rlcore.tasks.tracking.lineage import DIGITS, is_import, read_records
from rlcore.tasks.tracking.registry import pages
from rlcore.tasks.tracking.runs import open_tracker

_SPLITS = {"train": "train", "eval": "held out"}
_KINDS: Mapping[str, Kind] = {"demonstrations": "demonstrations", "preference_pairs": "preferences"}  # others: prompts
Layout = tuple[Kind, str, Mapping[str, Any]]


def find_rows(home: Home, path: Path) -> tuple[int, list[str]]:
    """Return how many prompts of a file a snapshot holds, and a line for each such snapshot with its models.

    A snapshot whose tables were removed is named too if a model descends from it.
    Raises:
        DataError: the file cannot be read, or a line has no prompt.
    """
    records, versions = read_records(home), list(_versions(home))
    wanted, found, lines = _read_prompts(path, records), set[str](), []
    for sha256 in sorted({each.ref.sha256 for each in records if each.ref.kind == "dataset"}):
        held = _held(home.artifacts / "dataset" / sha256, wanted)
        below = _descending(records, sha256)
        models = sorted(f"{each['name']}/{each['version']}" for each in versions if each.get("sha256") in below)
        if any(held.values()) or (not held and models):
            found.update(*held.values())
            stages = sorted({each.ingredients["stage"]["name"] for each in records if each.ref.sha256 == sha256})
            counts = ", ".join(f"{name} {len(prompts)}" for name, prompts in held.items()) or "rows unknown: removed"
            lines.append(f"{', '.join(stages)} {sha256[:DIGITS]}: {counts}; models: {', '.join(models) or 'none'}")
    return len(found), [*lines, f"in snapshots: {len(found)} of {len(wanted)} prompts"]


def _read_prompts(path: Path, records: Iterable[Record]) -> frozenset[str]:
    with contract_errors():
        source = read_source(path)
        lines = [(item.origin.line, item) for _, item in source.read(None)]
        rows = {line: item.values for line, item in lines if isinstance(item, SourceRow)}
        found = {(line, _hash(row["prompt"])) for line, row in rows.items() if isinstance(row.get("prompt"), str)}
        for layout in _layouts(records):
            found.update(_converted(source, layout))
    if unread := {line for line, _ in lines} - {line for line, _ in found}:
        raise DataError(
            f"line {min(unread)} names no row; such lines: {len(unread)} of {len(lines)}",
            where=str(path),
            fix='give rows as a dataset of this state directory has them, or {"prompt": "…"}',
        )
    return frozenset(prompt for _, prompt in found)


def _hash(prompt: str) -> str:
    return prompt_hash([{"role": "user", "content": prompt}])


def _layouts(records: Iterable[Record]) -> list[Layout]:
    tables = [
        data for each in records if each.ref.kind == "dataset" for data in each.ingredients["config"]["data"].values()
    ]
    layouts: list[Layout] = [
        (_KINDS.get(data["contract"], "prompts"), COLUMNS if data["columns"] else data["adapter"], data["columns"])
        for data in tables
        if data["path"]
    ]
    return list({json.dumps(each): each for each in layouts}.values())


def _converted(source: Source, layout: Layout) -> Iterator[tuple[int, str]]:
    """Yield the line and the hash of each prompt that a layout reads; another layout's file gives none."""
    kind, adapter, columns = layout
    with suppress(ContractError):
        for batch in stream_of(source, kind, adapter=adapter, columns=columns).batches():
            for origin, row in zip(batch.origins, batch.rows, strict=True):
                yield origin.line, prompt_hash(row["messages"])


def _held(snapshot: Path, wanted: frozenset[str]) -> dict[str, frozenset[str]]:
    tables = {shown: snapshot / f"{split}.parquet" for split, shown in _SPLITS.items()}
    return {
        shown: frozenset(prompt_hash(each) for some in read_column(table, "messages") for each in some) & wanted
        for shown, table in tables.items()
        if table.is_file()
    }


def _versions(home: Home) -> Iterator[Mapping[str, str]]:
    for each in pages(open_tracker(home).client.search_model_versions):
        yield {**each.tags, "name": each.name, "version": str(each.version)}


def _descending(records: Sequence[Record], sha256: str) -> frozenset[str]:
    found = {sha256}
    for record in reversed(records):
        read = {*read_by(record.ingredients).values()}
        read |= {record.ingredients["arguments"]["sha256"]} if is_import(record) else set()
        if read & found:
            found.add(record.ref.sha256)
    return frozenset(found)

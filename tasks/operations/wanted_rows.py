"""Rows that a file names: in the layout of a dataset, as prompts, or by their ids in snapshots."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlcore.data_contracts.adapters.convert import COLUMNS, stream_of
from rlcore.data_contracts.adapters.recognition import fits
from rlcore.data_contracts.adapters.targets import Kind
from rlcore.data_contracts.errors import ContractError
from rlcore.data_contracts.gate.denied import DIGITS
from rlcore.data_contracts.gate.reading import Source, read_source
from rlcore.data_contracts.gate.records import SourceRow
from rlcore.data_contracts.gate.stream import RowStream
from rlcore.data_contracts.text import prompt_hash
from rlcore.errors import DataError
from rlcore.tasks.operations.quotes import strings_in
from rlcore.tasks.steps.data_source import contract_errors
from rlcore.tasks.store.cache import Record

IDS = ("prompt_id", "demonstration_id", "pair_id")  # of the contracts' tables
_KINDS: Mapping[str, Kind] = {"demonstrations": "demonstrations", "preference_pairs": "preferences"}  # others: prompts
Layout = tuple[Kind, str, Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class WantedRows:
    """Rows that a file names, by its lines: hashes of their ``prompts``, or their ids in snapshots.

    ``texts``: all texts of the rows. ``digests``: of the file's lines.
    """

    prompts: Mapping[int, frozenset[str]]
    ids: Mapping[int, str]
    texts: tuple[str, ...]
    digests: frozenset[str]

    @property
    def num_lines(self) -> int:
        """Number of lines that name rows."""
        return len(self.prompts.keys() | self.ids.keys())


def read_wanted(path: Path, records: Iterable[Record]) -> WantedRows:
    """Read the rows of a file in the layout of a dataset of ``records``, in a known one, or as prompts or ids.

    Raises:
        DataError: the file cannot be read, or a line names no row.
    """
    with contract_errors():
        source = read_source(path)
        items = {item.origin.line: item for _, item in source.read(None)}
        rows = {line: item.values for line, item in items.items() if isinstance(item, SourceRow)}
        prompts: dict[int, set[str]] = {}
        for layout in _layouts(records):
            _add_prompts(prompts, source, layout)
        if rows.keys() - prompts.keys() and (known := _recognized(source)):
            _add_prompts(prompts, source, known)
    left = {line: values for line, values in rows.items() if line not in prompts}
    prompts |= {line: {prompt} for line, values in left.items() if (prompt := _plain_prompt(values))}
    ids = {line: name for line, values in left.items() if line not in prompts and (name := _plain_id(values))}
    if unread := items.keys() - prompts.keys() - ids.keys():
        raise DataError(
            f"line {min(unread)} names no row; such lines: {len(unread)} of {len(items)}",
            where=str(path),
            fix='give rows as a dataset has them, or {"prompt": "…"}, or {"id": "…"} with the id of a snapshot\'s row',
        )
    return WantedRows(
        prompts={line: frozenset(found) for line, found in prompts.items()},
        ids=ids,
        texts=tuple(sorted({text for line in prompts for text in strings_in(rows[line])})),
        digests=frozenset(item.origin.digest for item in items.values()) - {""},
    )


def source_lines(record: Record, prompts: frozenset[str]) -> dict[str, str]:
    """Return the lines of a dataset's source files with one of these prompts, as text by the file's path.

    Other sources are named with the reason why no line is given.
    """
    (data,) = record.ingredients["config"]["data"].values()
    found = {} if record.files else {data["path"] or data["adapter"]: "not a file: left to you"}
    for path in sorted(record.files.values()):
        try:
            stream = _stream(read_source(Path(path)), *_layout(data))
            lines = sorted({line for line, prompt in _prompts_of(stream) if prompt in prompts})
            found[path] = f"lines {', '.join(map(str, lines))}" if lines else "no such line any more"
        except ContractError as error:
            found[path] = f"cannot be read: {error.what}"
    return found


def _layouts(records: Iterable[Record]) -> list[Layout]:
    """Return the layouts in which datasets of these records were read, each once."""
    tables = [
        data for each in records if each.ref.kind == "dataset" for data in each.ingredients["config"]["data"].values()
    ]
    found = {json.dumps(_layout(data)): _layout(data) for data in tables if data["path"]}
    return list(found.values())


def _layout(data: Mapping[str, Any]) -> Layout:
    adapter = COLUMNS if data["columns"] else data["adapter"]
    return _KINDS.get(data["contract"], "prompts"), adapter, data["columns"]


def _recognized(source: Source) -> Layout | None:
    """Return the likeliest known layout of a file; None if it has none."""
    found = fits(source)
    return (found[0].kinds[0], found[0].adapter, {}) if found else None


def _stream(source: Source, kind: Kind, adapter: str, columns: Mapping[str, Any]) -> RowStream:
    return stream_of(source, kind, adapter=adapter, columns=columns)


def _add_prompts(prompts: dict[int, set[str]], source: Source, layout: Layout) -> None:
    """Add the prompts of the lines that a layout reads; another layout's file gives none."""
    with suppress(ContractError):
        for line, prompt in _prompts_of(_stream(source, *layout)):
            prompts.setdefault(line, set()).add(prompt)


def _prompts_of(stream: RowStream) -> Iterator[tuple[int, str]]:
    """Yield the number of the line and the hash of the prompt of each row."""
    for batch in stream.batches():
        for origin, row in zip(batch.origins, batch.rows, strict=True):
            yield origin.line, prompt_hash(row["messages"])[:DIGITS]


def _plain_prompt(values: Mapping[str, Any]) -> str:
    """Return the hash of a row's field ``prompt``, if that is a text; otherwise an empty text."""
    asked = values.get("prompt")
    return prompt_hash([{"role": "user", "content": asked}])[:DIGITS] if isinstance(asked, str) else ""


def _plain_id(values: Mapping[str, Any]) -> str:
    return next((str(values[name]) for name in ("id", *IDS) if name in values), "")

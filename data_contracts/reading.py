"""The strict reader: one source row per JSONL line or Parquet row; a bad line is set aside, a bad file is an error.

Blank lines carry nothing and are not counted. Every other line is a row or a quarantined line.
"""

from __future__ import annotations

import codecs
import hashlib
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from data_contracts.errors import ContractError
from data_contracts.records import Origin, Quarantined, SourceRow, canonical_json, excerpt
from data_contracts.strict_json import parse_object

MAX_LINE_BYTES = 1_000_000
_READERS = "a JSONL file (one JSON object a line, ending .jsonl) or a Parquet file (ending .parquet)"


@dataclass(frozen=True, kw_only=True)
class Source:
    """All rows of a source and the lines that could not become rows; ``name`` is a path, or says who made the rows."""

    name: str
    rows: tuple[SourceRow, ...]
    rejected: tuple[Quarantined, ...] = ()

    @property
    def num_lines(self) -> int:
        """How many lines were read."""
        return len(self.rows) + len(self.rejected)


def read_source(path: Path) -> Source:
    """Read a JSONL or Parquet file, by its ending.

    Raises:
        ContractError: no such file, no permission, a pipe or a device, neither format, a damaged Parquet file.
    """
    if path.suffix not in {".jsonl", ".parquet"}:
        raise ContractError(f"the ending {path.suffix!r} names no format", where=str(path), fix=f"give {_READERS}")
    try:
        require_file(path)
        return _read_jsonl(path) if path.suffix == ".jsonl" else _read_parquet(path)
    except FileNotFoundError as error:
        raise ContractError("the file does not exist", where=str(path), fix=f"give the path of {_READERS}") from error
    except (OSError, pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        if isinstance(error, OSError) and error.strerror:
            what, fix = f"cannot read the file: {error.strerror}", "check its permissions"
        else:  # pyarrow's own, an OSError without a number among them
            reason = str(error).partition("\n")[0]
            what, fix = f"not a readable Parquet file: {reason}", "write the file again from its source"
        raise ContractError(what, where=str(path), fix=fix) from error


def require_file(path: Path) -> None:
    """Refuse what is no file on a disk: to read a pipe waits for ever, and a device may never end.

    Raises:
        ContractError: a pipe, a device or a socket.
        OSError: there is nothing at the path, or it may not be looked at.
    """
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # a folder gives an error of its own
        raise ContractError("it is a pipe, a device or a socket, and no file", where=str(path), fix=f"give {_READERS}")


def source_of(name: str, rows: Sequence[dict[str, Any]]) -> Source:
    """Rows that are in memory already: generated, or of a table."""
    numbered = (SourceRow(origin=Origin(line=number), values=row) for number, row in enumerate(rows, 1))
    return Source(name=name, rows=tuple(numbered))


def joined(train: Source, held_out: Source) -> Source:
    """The rows of two sources, those of the first for training and those of the second held out."""
    parts = [_named(train, "train"), _named(held_out, "eval")]
    return Source(
        name=" and ".join(part.name for part in parts),
        rows=tuple(row for part in parts for row in part.rows),
        rejected=tuple(line for part in parts for line in part.rejected),
    )


def _named(source: Source, split: str) -> Source:
    """The source, each of whose rows knows where it is from and what it is for."""
    rows = (replace(row, origin=replace(row.origin, source=source.name), split=split) for row in source.rows)
    rejected = (replace(line, origin=replace(line.origin, source=source.name)) for line in source.rejected)
    return replace(source, rows=tuple(rows), rejected=tuple(rejected))


def _read_jsonl(path: Path) -> Source:
    rows: list[SourceRow] = []
    rejected: list[Quarantined] = []
    with path.open("rb") as file:
        for origin, line, is_whole in _lines(file):
            try:
                if not is_whole:
                    raise ValueError(f"longer than {MAX_LINE_BYTES} bytes")
                rows.append(SourceRow(origin=origin, values=parse_object(line)))
            except ValueError as error:
                text = excerpt(line[:400].decode("utf-8", "replace"))
                rejected.append(Quarantined(origin=origin, field="", excerpt=text, reason=str(error)))
    return Source(name=str(path), rows=tuple(rows), rejected=tuple(rejected))


def _lines(file: IO[bytes]) -> Iterator[tuple[Origin, bytes, bool]]:
    """Each line that is not blank, its first MB, and whether that is all of it."""
    offset, number = 0, 0
    while chunk := file.readline(MAX_LINE_BYTES + 2):
        number += 1
        line, length = chunk.rstrip(b"\r\n"), len(chunk)
        line = line.removeprefix(codecs.BOM_UTF8)  # of the file, or of one of several that were put together
        while not chunk.endswith(b"\n") and (chunk := file.readline(MAX_LINE_BYTES)):
            length += len(chunk)
        if line.strip():
            origin = Origin(line=number, offset=offset, digest=hashlib.sha256(line).hexdigest())
            yield origin, line, length <= MAX_LINE_BYTES + 2 and len(line) <= MAX_LINE_BYTES
        offset += length


def _read_parquet(path: Path) -> Source:
    with path.open("rb") as file:
        table = pq.read_table(file)
    table.validate(full=True)
    rows = tuple(
        SourceRow(origin=Origin(line=number, digest=_row_digest(values)), values=values)
        for number, values in enumerate(table.to_pylist(), 1)
    )
    return Source(name=str(path), rows=rows)


def _row_digest(values: dict[str, Any]) -> str:
    try:
        spelled = canonical_json(values)
    except (TypeError, ValueError):  # a date or NaN: the adapter says which field; the digest only names the row
        spelled = repr(values).encode("utf-8", "replace")
    return hashlib.sha256(spelled).hexdigest()

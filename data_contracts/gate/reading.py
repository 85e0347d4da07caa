"""Strict reader: a source row per line or Parquet row. A bad line is quarantined, a bad file is an error.

A source can be read repeatedly, never as a whole: ten million rows need no more memory than a few. Blank lines are not
counted.
"""

from __future__ import annotations

import codecs
import hashlib
import re
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from rlcore.data_contracts.errors import ContractError
from rlcore.data_contracts.gate.files import (
    COMPRESSED,
    FORMATS,
    MAX_LINE_BYTES,
    READERS,
    format_of,
    opened,
    require_file,
    row_files,
)
from rlcore.data_contracts.gate.formats import (
    csv_rows,
    json_rows,
    key_of_rows,
    parsed_row,
    read_batches,
    wrapped_error,
)
from rlcore.data_contracts.gate.records import Origin, Quarantined, SourceRow, canonical_json

_NAMES = {".parquet": "Parquet"}
_MAGIC = {b"\x1f\x8b": ".gz", b"\x28\xb5\x2f\xfd": ".zst", b"PAR1": ".parquet"}
_ARROW_ROWS = 100  # in memory as values
Item = SourceRow | Quarantined
Wanted = NDArray[np.bool_]
Items = Generator[tuple[int, Item], None, int]


@dataclass(frozen=True, kw_only=True)
class Source:
    """Source of rows.

    ``name``: a path, or the origin of the rows. ``label`` is recorded, without folders: the same file is the same
    dataset in any folder. ``read`` yields each line with its index, from 0, and returns their number; given a mask by
    index, it yields only those. ``state`` changes when the source does.
    """

    name: str
    label: str
    read: Callable[[Wanted | None], Items]
    state: Callable[[], object] = lambda: None

    @property
    def rows(self) -> list[SourceRow]:
        """Return all rows of a small source."""
        return [item for _, item in self.read(None) if isinstance(item, SourceRow)]

    @property
    def rejected(self) -> list[Quarantined]:
        """Return all lines that could not become rows."""
        return [item for _, item in self.read(None) if isinstance(item, Quarantined)]


def read_source(path: Path) -> Source:
    """Open a file of rows, by its ending, or the files of a pattern or a folder as one.

    Raises:
        ContractError: no such file, no permission, a pipe or a device, another format, a damaged Parquet file, a
            document over several lines in a JSONL file. Later damage in the file is raised while it is read.
    """
    with _readable(path):
        files = row_files(path)
    if files == [path]:
        return _read_file(path)
    if not files:
        raise ContractError("the pattern matches no file", where=str(path), fix=f"give {READERS}")
    parts = [_read_file(each) for each in files]
    return Source(
        name=str(path),
        label=path.name,
        read=partial(_joined, [("", part) for part in parts]),
        state=lambda: [part.state() for part in parts],
    )


def _read_file(path: Path) -> Source:
    form = format_of(path)
    if not form:
        raise ContractError(f"the ending {path.suffix!r} names no format", where=str(path), fix=f"give {READERS}")
    if path.suffix in COMPRESSED and form in (".parquet", ".arrow"):
        what = f"a {form} file is compressed inside, and is not read out of a {path.suffix} file"
        raise ContractError(what, where=str(path), fix="unpack it: gunzip FILE.gz, or zstd -d FILE.zst")
    with _readable(path):
        require_file(path)
        with path.open("rb") as raw:
            _require_ending(path, raw.read(4))
        with opened(path) as file:
            if form == ".parquet":
                pq.ParquetFile(file).close()
            elif form == ".jsonl":
                _require_lines(path, file)
    return Source(name=str(path), label=path.name, read=partial(_ITEMS[form], path), state=partial(_state, path))


def _require_ending(path: Path, start: bytes) -> None:
    for magic, ending in _MAGIC.items():
        if start.startswith(magic) and path.suffix != ending:
            is_packed = ending in COMPRESSED
            what = f"compressed with {COMPRESSED[ending]}" if is_packed else "a Parquet file"
            name = f"{path.name}{ending}" if is_packed else path.with_suffix(ending).name
            raise ContractError(f"the file is {what}", where=str(path), fix=f"name it {name}")


def _require_lines(path: Path, file: IO[bytes]) -> None:
    """Reject a document over several lines, or an array, each of whose lines would be quarantined."""
    found = (line.decode("utf-8", "replace").strip() for _, _, line, _ in islice(_lines(file), 3))
    first, second, third = (*found, "", "", "")[:3]
    if re.match(r'\[\s*\{\s*"', first) or (first == "[" and second.startswith("{")):
        what = "the file is one JSON array, and not one object a line"
        raise ContractError(what, where=str(path), fix="give it the ending .json, or write a row a line")
    is_object = first == "{" and second.startswith('"')
    key = key_of_rows(first + second + third) if is_object or not second else ""
    if key or is_object:
        raise wrapped_error(path, key)


def source_of(name: str, rows: Sequence[dict[str, Any]]) -> Source:
    """Return a source of rows in memory, or in a table that yields one at a time."""
    return Source(name=name, label=name, read=partial(_listed, rows))


def head_of(source: Source, limit: int) -> Source:
    """Return a source of the first lines of another, which are read once.

    Raises:
        ContractError: the source cannot be read.
    """
    found = [item for _, item in islice(source.read(None), limit)]

    def read(wanted: Wanted | None) -> Items:
        yield from ((place, item) for place, item in enumerate(found) if wanted is None or wanted[place])
        return len(found)

    return Source(name=source.name, label=source.label, read=read)


def joined(train: Source, held_out: Source) -> Source:
    """Join two sources, the first for training and the second for evaluation."""
    parts = (("train", train), ("eval", held_out))
    if train.label == held_out.label:
        train, held_out = (replace(source, label=f"{split} {source.label}") for split, source in parts)
        parts = (("train", train), ("eval", held_out))
    return Source(
        name=f"{train.name} and {held_out.name}",
        label=f"{train.label} and {held_out.label}",
        read=partial(_joined, parts),
        state=lambda: (train.state(), held_out.state()),
    )


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise ContractError("no such file", where=str(path), fix=f"give the path of {READERS}") from error
    except (OSError, ValueError, pa.ArrowNotImplementedError) as error:  # pyarrow's are of these
        if isinstance(error, OSError) and error.strerror:
            what, fix = f"cannot read the file: {error.strerror}", "check its permissions"
        else:  # including pyarrow's OSErrors without a number
            reason = str(error).partition("\n")[0]
            what, fix = (
                f"not a readable {_NAMES.get(path.suffix, path.suffix)} file: {reason}",
                "write the file again from its source",
            )
        raise ContractError(what, where=str(path), fix=fix) from error


def _state(path: Path) -> object:
    with _readable(path):
        found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns


def _listed(rows: Sequence[dict[str, Any]], wanted: Wanted | None) -> Items:
    chosen = enumerate(rows) if wanted is None else ((place, rows[place]) for place in np.flatnonzero(wanted).tolist())
    for place, values in chosen:
        yield place, SourceRow(origin=Origin(line=place + 1), values=values)
    return len(rows)


def _joined(parts: Sequence[tuple[str, Source]], wanted: Wanted | None) -> Items:
    start = 0
    for split, source in parts:
        items = source.read(None if wanted is None else wanted[start:])
        while True:
            try:
                place, item = next(items)
            except StopIteration as end:
                start += end.value
                break
            named = replace(item, origin=replace(item.origin, source=item.origin.source or source.label))
            yield start + place, replace(named, split=split) if split and isinstance(named, SourceRow) else named
    return start


def _jsonl_items(path: Path, wanted: Wanted | None) -> Items:
    place = 0
    with _readable(path), opened(path) as file:
        for number, offset, line, is_whole in _lines(file):
            if wanted is None or (place < len(wanted) and wanted[place]):
                origin = Origin(line=number, offset=offset, digest=_sha256(line))
                yield place, parsed_row(line, origin, is_whole=is_whole)
            place += 1
    return place


def _lines(file: IO[bytes]) -> Iterator[tuple[int, int, bytes, bool]]:
    """Yield number and offset of each nonblank line, its first MB, and True if that is all of it."""
    offset, number = 0, 0
    while chunk := file.readline(MAX_LINE_BYTES + 2):
        number += 1
        line, length = chunk.rstrip(b"\r\n"), len(chunk)
        line = line.removeprefix(codecs.BOM_UTF8)  # of the file, or of one of several joined files
        while not chunk.endswith(b"\n") and (chunk := file.readline(MAX_LINE_BYTES)):
            length += len(chunk)
        if line.strip():
            yield number, offset, line, length <= MAX_LINE_BYTES + 2 and len(line) <= MAX_LINE_BYTES
        offset += length


def _parquet_items(path: Path, wanted: Wanted | None) -> Items:
    start = 0
    with _readable(path), path.open("rb") as file:
        for batch in read_batches(path, file):
            is_long = batch.sizes > MAX_LINE_BYTES
            mask = np.full(len(is_long), wanted is None)
            if wanted is not None:
                part = wanted[start : start + len(is_long)]  # truncated meanwhile
                mask[: len(part)] = part
            rows = batch.rows(np.flatnonzero(mask & ~is_long))
            for place in np.flatnonzero(mask).tolist():
                values = None if is_long[place] else next(rows)
                yield start + place, _parquet_item(start + place + 1, values)
            start += len(is_long)
    return start


def _arrow_rows(path: Path) -> Iterator[Item]:
    line = 0
    with path.open("rb") as file, pa.ipc.open_stream(file) as batches:
        for batch in batches:
            for start in range(0, len(batch), _ARROW_ROWS):
                for values in batch.slice(start, _ARROW_ROWS).to_pylist():
                    line += 1
                    yield _parquet_item(line, None if len(str(values)) > MAX_LINE_BYTES else values)


def _parquet_item(line: int, values: dict[str, Any] | None) -> Item:
    if values is None:
        reason = f"longer than {MAX_LINE_BYTES} bytes"
        return Quarantined(origin=Origin(line=line), field="", excerpt="", reason=reason)
    return SourceRow(origin=Origin(line=line, digest=_row_digest(values)), values=values)


def _row_digest(values: dict[str, Any]) -> str:
    try:
        spelled = canonical_json(values)
    except (TypeError, ValueError):  # a date or NaN: the adapter names the field; the digest only identifies the row
        spelled = repr(values).encode("utf-8", "replace")
    return _sha256(spelled)


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _document_items(rows: Callable[[Path], Iterator[Item]], path: Path, wanted: Wanted | None) -> Items:
    count = 0
    with _readable(path):
        for place, item in enumerate(rows(path)):
            count += 1
            if wanted is None or (place < len(wanted) and wanted[place]):
                yield place, item
    return count


_ITEMS: dict[str, Callable[[Path, Wanted | None], Items]] = {
    ".jsonl": _jsonl_items,
    ".json": partial(_document_items, json_rows),
    ".parquet": _parquet_items,
    ".csv": partial(_document_items, csv_rows),
    ".tsv": partial(_document_items, csv_rows),
    ".arrow": partial(_document_items, _arrow_rows),
}
ENDINGS = (*FORMATS, *(f"{form}{packed}" for form in FORMATS for packed in COMPRESSED))
"""Endings of files of rows."""

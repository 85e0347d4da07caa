"""Readers of JSON arrays, tables with a header, and Parquet files.

A Parquet file of 1 kB can represent 20 GB of text. Texts stay dictionary-encoded until their rows are measured: a long
text that a million rows share is in memory once. The caller quarantines a row beyond the limit of a JSONL line.
"""

from __future__ import annotations

import codecs
import csv
import hashlib
import io
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from rlcore.data_contracts.errors import ContractError
from rlcore.data_contracts.gate.files import MAX_LINE_BYTES, format_of, opened
from rlcore.data_contracts.gate.records import Origin, Quarantined, SourceRow, excerpt
from rlcore.data_contracts.gate.strict_json import parse_object

MAX_BYTES = 500_000_000  # of a document, which memory holds
_ROWS = re.compile(r'\s*\{[^][{}]*"([^"]+)"\s*:\s*\[\s*\{\s*"(?!role"|from")')  # a row may be a list of turns
_AT_A_TIME, _READ_BYTES = 1_024, 2**20  # rows
_BATCH_VALUES, _PLAIN_BYTES = 4_000_000, 2**26
_GROUP_VALUES = 200_000_000  # bytes of one column of a row group
_VALUE_BYTES = 8  # bytes of a number
_TO_LINES = "write one object a line, with the ending .jsonl: jq -c '.[]' FILE.json > FILE.jsonl"


def json_rows(path: Path) -> Iterator[SourceRow | Quarantined]:
    """Yield the objects of a JSON array, or of a file of JSON lines that ends in ``.json``.

    Raises:
        ContractError: neither, too large, or not UTF-8.
    """
    text = _text(path)
    if text.lstrip()[:1] == "{":
        yield from _json_lines(path, text)
        return
    line, place, decoder = 1, 0, json.JSONDecoder()
    for start, end in _spans(path, text, decoder):
        line, place = line + text.count("\n", place, start), start
        yield _row(text[start:end], line)


def _json_lines(path: Path, text: str) -> Iterator[SourceRow | Quarantined]:
    first, *others = (line for line in text.splitlines() if line.strip())
    try:
        json.loads(first)
    except ValueError as error:
        raise wrapped_error(path, key_of_rows(text)) from error
    if not others and (key := key_of_rows(first)):
        raise wrapped_error(path, key)
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield _row(line.strip(), number)


def key_of_rows(text: str) -> str:
    """Return the key of a JSON object, ``{"data": [{…}, …]}``, whose value is a list of rows; "" if there is none."""
    return found[1] if (found := _ROWS.match(text)) else ""


def wrapped_error(path: Path, key: str) -> ContractError:
    """Return the error of a file that is one object; ``key``: that of its rows."""
    rows = f"whose {key!r} has the rows" if key else "and not an array of rows"
    fix = "give an array of rows (.json), [{…}, {…}], or an object a line (.jsonl)"
    unpack = f": jq -c '.{key}[]' FILE > FILE.jsonl" if key else ""
    return ContractError(f"the file is one JSON object, {rows}", where=str(path), fix=fix + unpack)


def _spans(path: Path, text: str, decoder: json.JSONDecoder) -> Iterator[tuple[int, int]]:
    place = _skip(text, 0)
    if text[place : place + 1] != "[":
        raise ContractError("the file is no JSON array of rows", where=str(path), fix=_TO_LINES)
    place = _skip(text, place + 1)
    while text[place : place + 1] != "]":
        try:
            _, end = decoder.raw_decode(text, place)
        except (json.JSONDecodeError, RecursionError) as error:
            raise _broken(path, text, getattr(error, "pos", place), str(getattr(error, "msg", error))) from error
        yield place, end
        place = _skip(text, end)
        if text[place : place + 1] == ",":
            place = _skip(text, place + 1)
        elif text[place : place + 1] != "]":
            raise _broken(path, text, place, "a comma or ] is missing")
    if (rest := _skip(text, place + 1)) < len(text):
        raise _broken(path, text, rest, "there is more behind the array")


def _broken(path: Path, text: str, place: int, reason: str) -> ContractError:
    line = text.count("\n", 0, place) + 1
    return ContractError(f"malformed JSON in line {line}: {reason}", where=str(path), fix="correct the file")


def _skip(text: str, place: int) -> int:
    while place < len(text) and text[place] in " \t\r\n":
        place += 1
    return place


def _row(text: str, number: int) -> SourceRow | Quarantined:
    line = text.encode("utf-8", "surrogatepass")
    origin = Origin(line=number, digest=hashlib.sha256(line).hexdigest())
    return parsed_row(line, origin, is_whole=len(line) <= MAX_LINE_BYTES)


def parsed_row(line: bytes, origin: Origin, *, is_whole: bool) -> SourceRow | Quarantined:
    """Return the row of a line of JSON, or the reason why it is none; ``is_whole``: it is not too long."""
    try:
        if not is_whole:
            raise ValueError(f"longer than {MAX_LINE_BYTES} bytes")
        return SourceRow(origin=origin, values=parse_object(line))
    except ValueError as error:
        shown = excerpt(line[:400].decode("utf-8", "replace"))
        return Quarantined(origin=origin, field="", excerpt=shown, reason=str(error))


def csv_rows(path: Path) -> Iterator[SourceRow | Quarantined]:
    """Yield the lines of a table as rows of texts, named by its header; an empty cell is null. Cells of ``.tsv`` are
    divided by tabs.

    Raises:
        ContractError: no header, two columns of one name, or no commas between columns.
    """
    csv.field_size_limit(MAX_LINE_BYTES)
    mark = "\t" if format_of(path) == ".tsv" else ","
    reader = csv.reader(io.StringIO(_text(path), newline=""), delimiter=mark, strict=True)
    names = next(reader, [])
    _require_header(path, names)
    while True:
        start = reader.line_num + 1
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise ContractError(
                f"malformed CSV in line {start}: {error}",
                where=str(path),
                fix='write quotes in a cell as "" and end each quoted cell with a quote',
            ) from error
        if cells:
            yield _csv_row(names, cells, start)


def _csv_row(names: list[str], cells: list[str], line: int) -> SourceRow | Quarantined:
    digest = hashlib.sha256("\0".join(cells).encode("utf-8", "surrogatepass")).hexdigest()
    origin = Origin(line=line, digest=digest)
    if len(cells) != len(names):
        reason = f"has {len(cells)} cells, and the header {len(names)}"
        return Quarantined(origin=origin, field="", excerpt=excerpt(", ".join(cells)), reason=reason)
    if broken := [place for place, cell in enumerate(cells) if "\0" in cell]:
        field, shown, reason = names[broken[0]], excerpt(cells[broken[0]]), "a NUL character; write the file as UTF-8"
        return Quarantined(origin=origin, field=field, excerpt=shown, reason=reason)
    return SourceRow(origin=origin, values={name: cell or None for name, cell in zip(names, cells, strict=True)})


def _require_header(path: Path, names: list[str]) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice or not all(name.strip() for name in names):
        what = f"the header names {twice[0]!r} twice" if twice else "the header has a column without a name"
        raise ContractError(what, where=str(path), fix="name each column once, in the first line")
    if len(names) == 1 and (mark := next((one for one in ";\t|" if one in names[0]), "")):
        what = f"the columns are divided by {mark!r}, and not by commas"
        raise ContractError(what, where=str(path), fix="write the table with commas: pandas' to_csv(index=False) does")


def _text(path: Path) -> str:
    with opened(path) as file:
        content = file.read(MAX_BYTES + 1).removeprefix(codecs.BOM_UTF8)
    if len(content) > MAX_BYTES:
        what = f"the file has more than {MAX_BYTES:,} bytes, and a .json, .csv or .tsv file is read whole"
        raise ContractError(what, where=str(path), fix="write it as .jsonl or .parquet")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        what = f"not UTF-8: byte 0x{content[error.start]:02x} in line {line}"
        raise ContractError(what, where=str(path), fix="write the file as UTF-8") from error


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Some rows: the bytes of each, ``sizes`` [N], and their values."""

    table: pa.RecordBatch
    sizes: NDArray[np.int64]

    def rows(self, places: NDArray[np.int64]) -> Iterator[dict[str, Any]]:
        """Return the rows at these indices as plain values, few at a time if they are long."""
        chunks = np.cumsum(self.sizes[places]) // _PLAIN_BYTES
        for chunk in np.unique(chunks):
            yield from self.table.take(pa.array(places[chunks == chunk])).to_pylist()


def read_batches(path: Path, file: IO[bytes]) -> Iterator[Batch]:
    """Read the rows in order.

    Raises:
        ContractError: the metadata has larger rows than allowed.
        pyarrow.ArrowInvalid: the file is damaged.
    """
    with pq.ParquetFile(file) as table:
        texts = [column.path for column in _columns(table) if column.physical_type == "BYTE_ARRAY"]
        num_values = _require_bounds(path, table.metadata)
    file.seek(0)
    options = {"pre_buffer": False, "buffer_size": _READ_BYTES, "read_dictionary": texts}
    with pq.ParquetFile(file, **options) as table:
        for group, most in enumerate(num_values):
            rows = max(1, min(_AT_A_TIME, _BATCH_VALUES // max(1, most)))
            for batch in table.iter_batches(batch_size=rows, row_groups=[group]):
                batch.validate(full=True)
                sizes = sum((_sizes(column) for column in batch.columns), np.zeros(len(batch), dtype=np.int64))
                yield Batch(table=batch, sizes=sizes)


def _columns(table: pq.ParquetFile) -> list[Any]:
    return [table.schema.column(place) for place in range(len(table.schema))]


def _require_bounds(path: Path, described: pq.FileMetaData) -> list[int]:
    found = []
    for place in range(described.num_row_groups):
        group = described.row_group(place)
        columns = [group.column(each) for each in range(group.num_columns)]
        values = max((column.num_values for column in columns), default=0)
        size = max((column.total_uncompressed_size for column in columns), default=0)
        rows = max(1, group.num_rows)
        if values > _GROUP_VALUES or size > rows * MAX_LINE_BYTES:
            raise ContractError(
                f"row group {place + 1} of {group.num_rows} rows has {values} values and {size} bytes in one column",
                where=str(path),
                fix=f"write it in smaller groups, of rows with at most {MAX_LINE_BYTES} bytes",
            )
        found.append(-(-values // rows))
    return found


def _sizes(column: pa.Array) -> NDArray[np.int64]:
    kind = column.type
    if pa.types.is_dictionary(kind):
        entries = np.append(_sizes(column.dictionary), 0)  # the last is that of null
        return np.take(entries, _plain(pc.fill_null(column.indices, len(entries) - 1)))
    if _is_text(kind):
        return _plain(pc.fill_null(pc.binary_length(column), 0))
    if pa.types.is_fixed_size_list(kind):
        return _sizes(column.cast(pa.list_(kind.value_type)))
    if pa.types.is_map(kind):
        return _sizes_of_lists(column, pa.StructArray.from_arrays([column.keys, column.items], ["key", "item"]))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _sizes_of_lists(column, column.values)
    if pa.types.is_struct(kind):
        return sum((_sizes(each) for each in column.flatten()), np.zeros(len(column), dtype=np.int64))
    return np.full(len(column), _VALUE_BYTES, dtype=np.int64)


def _sizes_of_lists(column: pa.Array, values: pa.Array) -> NDArray[np.int64]:
    ends = np.concatenate([[0], np.cumsum(_sizes(values))]).astype(np.int64)
    found = np.take(ends, _plain(column.offsets))
    return found[1:] - found[:-1]


def _plain(numbers: pa.Array) -> NDArray[np.int64]:
    found: NDArray[np.int64] = numbers.to_numpy(zero_copy_only=False).astype(np.int64)
    return found


def _is_text(kind: pa.DataType) -> bool:
    return any(
        test(kind)
        for test in (pa.types.is_string, pa.types.is_binary, pa.types.is_large_string, pa.types.is_large_binary)
    )

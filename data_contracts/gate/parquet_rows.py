"""Bounded reader of Parquet rows: a file of 1 kB can represent 20 GB of text.

Texts stay dictionary-encoded until their rows are measured: a long text that a million rows share is in memory once.
The caller quarantines a row beyond the limit of a JSONL line. The file's metadata of a row group is checked before
reading.
"""

from __future__ import annotations

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
from rlcore.data_contracts.gate.files import MAX_LINE_BYTES

_ROWS, _READ_BYTES = 1_024, 2**20  # rows at a time
_BATCH_VALUES, _PLAIN_BYTES = 4_000_000, 2**26
_GROUP_VALUES = 200_000_000  # bytes of one column of a row group
_VALUE_BYTES = 8  # bytes of a number


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
            rows = max(1, min(_ROWS, _BATCH_VALUES // max(1, most)))
            for batch in table.iter_batches(batch_size=rows, row_groups=[group]):
                batch.validate(full=True)
                sizes = sum((_sizes(column) for column in batch.columns), np.zeros(len(batch), dtype=np.int64))
                yield Batch(table=batch, sizes=sizes)


def _columns(table: pq.ParquetFile) -> list[Any]:
    return [table.schema.column(place) for place in range(len(table.schema))]


def _require_bounds(path: Path, described: pq.FileMetaData) -> list[int]:
    """Check the average value of the longest column in each group."""
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
    """Return the bytes of each value [N], the sum of its parts; 8 for a number."""
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

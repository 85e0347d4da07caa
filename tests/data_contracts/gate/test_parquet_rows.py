"""Parquet files that stand for more than they weigh: bounds on rows, groups and what is in memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlcore.data_contracts.errors import ContractError
from rlcore.data_contracts.gate.files import MAX_LINE_BYTES
from rlcore.data_contracts.gate.reading import read_source

READ_IT = """
import resource, sys
from pathlib import Path
from rlcore.data_contracts.gate.reading import read_source
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
for path in sys.argv[1:]:
    source = read_source(Path(path))
    print(len(source.rows), len(source.rejected), source.rejected[0].reason)
"""


def shared_text(length: int, rows: int) -> pa.Array:
    """One text that all rows share."""
    return pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, dtype=np.int32)), pa.array(["x" * length]))


def test_a_kilobyte_that_stands_for_gigabytes_is_set_aside_row_by_row_within_four(tmp_path: Path) -> None:
    column: Any = shared_text(20_000_000, 250)
    nested = pa.ListArray.from_arrays(pa.array(range(251)), pa.StructArray.from_arrays([column], ["content"]))
    paths = [tmp_path / "flat.parquet", tmp_path / "nested.parquet"]
    for path, each in zip(paths, (column, nested), strict=True):
        pq.write_table(pa.table({"prompt": each}), path, compression="zstd")
        assert path.stat().st_size < 20_000
    command = [sys.executable, "-c", READ_IT, *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == [f"0 250 longer than {MAX_LINE_BYTES} bytes"] * 2, done.stderr


def test_rows_around_a_long_one_are_kept_with_their_numbers(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    texts, turns = ["a", "b" * (MAX_LINE_BYTES + 1), None, "c" * MAX_LINE_BYTES], [{"role": "user"}]
    pq.write_table(pa.table({"prompt": texts, "turns": [turns, turns, [], None]}), path)
    source = read_source(path)
    assert [(row.origin.line, row.values) for row in source.rows] == [
        (1, {"prompt": "a", "turns": turns}),
        (3, {"prompt": None, "turns": []}),
        (4, {"prompt": texts[3], "turns": None}),
    ]
    assert [row.origin.line for row in source.rejected] == [2]


def test_a_group_described_as_larger_than_its_rows_can_be_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    numbers = pa.ListArray.from_arrays(pa.array([0, 250_000_000]), pa.array(np.zeros(250_000_000, dtype=np.int8)))
    pq.write_table(pa.table({"numbers": numbers}), path)
    with pytest.raises(ContractError, match="row group 1 of 1 rows has 250000000 values") as caught:
        list(read_source(path).read(None))
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "column",
    [
        pa.array([{"a": 1, "b": ["x", None]}, None]),
        pa.array([[("key", 1)], []], pa.map_(pa.string(), pa.int64())),
        pa.array(["x", None], pa.large_string()),
        pa.array([b"x", None]),
        pa.array([1.5, None]),
        pa.array([[[1], [2, 3]], [[], None]]),
        pa.array([[1, 2], [3, 4]], pa.list_(pa.int64(), 2)),
    ],
    ids=lambda column: str(column.type),
)
def test_values_of_every_kind_come_as_they_were_written(tmp_path: Path, column: pa.Array) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"value": column}), path)
    assert [row.values["value"] for row in read_source(path).rows] == column.to_pylist()

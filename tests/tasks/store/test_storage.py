from __future__ import annotations

import json
import math
import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.errors import StorageError
from rlcore.tasks.store import storage
from rlcore.tasks.store.storage import (
    read_column,
    read_json,
    read_table,
    table_writer,
    write_bytes,
    write_json,
    write_table,
)

TURNS = [{"role": "user", "content": "3 + 4"}, {"role": "assistant", "content": "7 ✓"}]


@contextmanager
def as_nobody() -> Iterator[None]:
    """Root may do anything: be another user for a moment."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


@contextmanager
def disk_of(num_bytes: int) -> Iterator[None]:
    """No file may grow beyond ``num_bytes``: the write stops in the middle, as on a full disk."""
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_table_comes_back_with_its_types_and_plain_lists(tmp_path: Path) -> None:
    frame = pd.DataFrame(
        {
            "name": ["a", ""],
            "messages": [TURNS, TURNS[:1]],
            "ids": [[1, 2], []],
            "logprobs": [[-0.5], [0.0, -1.0]],
            "mask": [[True], [False]],
            "value": [1.0, math.nan],
            "count": [1, 2],
            "correct": [True, False],
        }
    )
    write_table(frame, tmp_path / "new" / "table.parquet")
    back = read_table(tmp_path / "new" / "table.parquet")
    pd.testing.assert_frame_equal(back, frame)
    assert back["messages"][0] == TURNS
    assert type(back["ids"][0]) is list
    assert type(back["mask"][0][0]) is bool


@settings(deadline=None, max_examples=30)
@given(
    st.lists(
        st.tuples(st.text(st.characters(exclude_categories=["Cs"])), st.lists(st.integers(0, 2**40)), st.booleans()),
        min_size=1,
        max_size=5,
    )
)
def test_any_table_survives_the_way_to_disk_and_back(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, list[int], bool]]
) -> None:
    frame = pd.DataFrame(rows, columns=["text", "ids", "flag"])
    path = tmp_path_factory.mktemp("tables") / "table.parquet"
    write_table(frame, path)
    pd.testing.assert_frame_equal(read_table(path), frame)


def test_an_index_is_not_stored_and_an_empty_table_keeps_its_columns(tmp_path: Path) -> None:
    path = tmp_path / "table.parquet"
    write_table(pd.DataFrame({"a": [1, 2], "b": [[1], [2]]}, index=[5, 9]), path)
    assert read_table(path).index.tolist() == [0, 1]
    write_table(pd.DataFrame({"a": [1], "b": [[1]]}).iloc[:0], path)
    assert list(read_table(path).columns) == ["a", "b"]


def test_a_table_in_parts_is_the_whole_table_and_of_one_group_its_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frame = pd.DataFrame({"name": [str(number) for number in range(50)], "messages": [TURNS] * 50, "value": 0.5})
    write_table(frame, tmp_path / "whole.parquet")
    with table_writer(tmp_path / "parts.parquet") as add:
        for start in range(0, 50, 7):
            add(frame.iloc[start : start + 7])
    assert (tmp_path / "parts.parquet").read_bytes() == (tmp_path / "whole.parquet").read_bytes()
    monkeypatch.setattr(storage, "GROUP_ROWS", 10)
    with table_writer(tmp_path / "groups.parquet") as add:
        for start in range(0, 50, 7):
            add(frame.iloc[start : start + 7])
    assert pq.ParquetFile(tmp_path / "groups.parquet").num_row_groups == 4
    pd.testing.assert_frame_equal(read_table(tmp_path / "groups.parquet"), frame)
    assert [one for some in read_column(tmp_path / "groups.parquet", "messages") for one in some] == [TURNS] * 50


def test_a_table_in_parts_that_is_given_up_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "table.parquet"
    path.write_bytes(b"old")
    with pytest.raises(RuntimeError), table_writer(path) as add:
        add(pd.DataFrame({"a": [1]}))
        raise RuntimeError
    assert [entry.name for entry in tmp_path.iterdir()] == ["table.parquet"]
    assert path.read_bytes() == b"old"
    with pytest.raises(StorageError, match="cannot be stored"), table_writer(path) as add:
        add(pd.DataFrame({"a": ["x", 1]}))


def test_a_column_of_mixed_types_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot be stored") as caught:
        write_table(pd.DataFrame({"a": [1, "x"]}), tmp_path / "table.parquet")
    assert caught.value.fix
    assert list(tmp_path.iterdir()) == []


def test_json_comes_back_and_nan_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a" / "value.json"
    write_json({"x": [1, "ä", None, True]}, path)
    assert read_json(path) == {"x": [1, "ä", None, True]}
    assert "ä" in path.read_text(encoding="utf-8")
    with pytest.raises(StorageError, match="no JSON"):
        write_json({"x": math.nan}, path)
    assert read_json(path) == {"x": [1, "ä", None, True]}


def test_a_full_disk_leaves_the_old_file_and_no_rubbish(tmp_path: Path) -> None:
    path = tmp_path / "value.json"
    write_json({"old": 1}, path)
    with disk_of(1000), pytest.raises(StorageError, match="cannot write the file: File too large") as caught:
        write_bytes(b"x" * 5000, path)
    assert caught.value.where == str(path)
    assert json.loads(path.read_text()) == {"old": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["value.json"]


def test_a_folder_without_permission_says_what_to_do(tmp_path: Path) -> None:
    folder = tmp_path / "closed"
    folder.mkdir()
    write_json(1, folder / "value.json")
    write_table(pd.DataFrame({"a": [1]}), folder / "table.parquet")
    folder.chmod(0)
    try:
        with as_nobody():
            for act in (
                lambda: write_bytes(b"x", folder / "new"),
                lambda: read_json(folder / "value.json"),
                lambda: read_table(folder / "table.parquet"),
            ):
                with pytest.raises(StorageError, match="Permission denied") as caught:
                    act()
                assert "right to read and write" in caught.value.fix
    finally:
        folder.chmod(0o700)


@pytest.mark.parametrize("read", [read_json, read_table])
def test_a_missing_and_a_damaged_file_are_named(tmp_path: Path, read: object) -> None:
    assert callable(read)
    path = tmp_path / "file"
    with pytest.raises(StorageError, match="No such file or directory") as caught:
        read(path)
    assert caught.value.where == str(path)
    path.write_bytes(b"PAR1 and then nonsense {")
    with pytest.raises(StorageError, match="not a") as caught:
        read(path)
    assert caught.value.where == str(path)

"""JSON arrays and CSV tables as rows."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from rlcore.data_contracts.errors import ContractError
from rlcore.data_contracts.gate.reading import read_source

ROWS = [{"a": f'text {number}, "quoted"\nover lines', "b": str(number)} for number in range(4)]


def write(folder: Path, name: str, text: str) -> Path:
    (folder / name).write_text(text, encoding="utf-8")
    return folder / name


@pytest.mark.parametrize("indent", [None, 2])
def test_an_array_gives_its_objects_with_their_lines(tmp_path: Path, indent: int | None) -> None:
    source = read_source(write(tmp_path, "rows.json", json.dumps(ROWS, indent=indent)))
    assert [row.values for row in source.rows] == ROWS
    assert [row.origin.line for row in source.rows] == ([1] * 4 if indent is None else [2, 6, 10, 14])
    assert [place for place, _ in source.read(np.array([False, True, False, True]))] == [1, 3]


def test_lines_in_a_json_file_are_read_as_lines(tmp_path: Path) -> None:
    source = read_source(write(tmp_path, "rows.json", "".join(json.dumps(row) + "\n" for row in ROWS)))
    assert [row.values for row in source.rows] == ROWS


def test_an_item_that_is_no_row_is_quarantined_by_its_line(tmp_path: Path) -> None:
    source = read_source(write(tmp_path, "rows.json", '[{"a": 1},\n 3,\n {"a": NaN},\n {"a": 1, "a": 2}]'))
    assert [row.values for row in source.rows] == [{"a": 1}]
    assert [(one.origin.line, one.reason) for one in source.rejected] == [
        (2, "a row is a JSON object, and this is int"),
        (3, "NaN is not JSON"),
        (4, "duplicate key 'a'"),
    ]


@pytest.mark.parametrize(
    ("name", "text", "what"),
    [
        ("rows.json", '[{"a": 1}\n{"a": 2}]', "malformed JSON in line 2: a comma or ] is missing"),
        ("rows.json", '[{"a": 1},\n{"a": }]', "malformed JSON in line 2"),
        ("rows.json", '[{"a": 1}] 3', "there is more behind the array"),
        ("rows.json", '{\n "a": 1\n}', "the file is one JSON object, and not an array of rows"),
        ("rows.json", json.dumps({"data": ROWS}), "the file is one JSON object, whose 'data' has the rows"),
        ("rows.json", json.dumps({"v": 1, "data": ROWS}, indent=1), "the file is one JSON object, whose 'data' has"),
        ("rows.jsonl", json.dumps({"data": ROWS}), "the file is one JSON object, whose 'data' has the rows"),
        ("rows.json", "3", "is no JSON array"),
        ("rows.json", "", "is no JSON array"),
        ("rows.jsonl", json.dumps(ROWS), "is one JSON array"),
        ("rows.jsonl", json.dumps(ROWS, indent=1), "is one JSON array"),
        ("rows.jsonl", json.dumps(ROWS[0], indent=1), "the file is one JSON object, and not"),
        ("rows.csv", "a;b\n1;2\n", "divided by ';', and not by commas"),
        ("rows.csv", "a,a\n1,2\n", "names 'a' twice"),
        ("rows.csv", "a,\n1,2\n", "a column without a name"),
        ("rows.csv", 'a,b\n1,"2\n', "malformed CSV in line 2"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_error_with_what_to_do(
    tmp_path: Path, name: str, text: str, what: str
) -> None:
    with pytest.raises(ContractError) as caught:
        assert read_source(write(tmp_path, name, text)).rows
    assert what in caught.value.what
    assert caught.value.fix
    assert caught.value.where.endswith(name)


def test_a_table_gives_texts_and_null_for_an_empty_cell(tmp_path: Path) -> None:
    text = '\ufeffa,b\n"one, ""two""\nthree",\n4,5\n6\n'
    source = read_source(write(tmp_path, "rows.csv", text))
    assert [row.values for row in source.rows] == [{"a": 'one, "two"\nthree', "b": None}, {"a": "4", "b": "5"}]
    assert [row.origin.line for row in source.rows] == [2, 4]
    assert [(one.origin.line, one.reason) for one in source.rejected] == [(5, "has 1 cells, and the header 2")]


def test_a_row_of_turns_in_one_object_is_a_row(tmp_path: Path) -> None:
    row = {"messages": [{"role": "user", "content": "Why?"}]}
    for name in ("rows.json", "rows.jsonl"):
        assert [one.values for one in read_source(write(tmp_path, name, json.dumps(row))).rows] == [row]
        lists = f"{json.dumps({'data': ROWS})}\n" * 2
        assert len(read_source(write(tmp_path, name, lists)).rows) == 2


def test_a_nul_character_of_a_table_is_named_with_its_column(tmp_path: Path) -> None:
    (lost,) = read_source(write(tmp_path, "rows.csv", "a,b\n1,2\0\n3,4\n")).rejected
    assert (lost.origin.line, lost.field) == (2, "b")
    assert lost.reason.startswith("a NUL character")


@pytest.mark.parametrize(
    ("name", "content", "what", "fix"),
    [
        ("rows.jsonl", gzip.compress(b"{}", mtime=0), "compressed with gzip", "rows.jsonl.gz"),
        ("rows.csv", gzip.compress(b"a,b", mtime=0), "compressed with gzip", "rows.csv.gz"),
        ("rows.parquet", b"\x28\xb5\x2f\xfd", "compressed with zstd", "rows.parquet.zst"),
        ("rows.json", b"PAR1", "a Parquet file", "rows.parquet"),
    ],
)
def test_a_file_of_another_format_than_its_ending_gets_its_right_name(
    tmp_path: Path, name: str, content: bytes, what: str, fix: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ContractError) as caught:
        read_source(tmp_path / name)
    assert (caught.value.what, caught.value.fix) == (f"the file is {what}", f"name it {fix}")


def test_a_file_that_is_not_utf8_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_bytes(b"a,b\n1,\xe4\n")
    with pytest.raises(ContractError, match="not UTF-8: byte 0xe4 in line 2"):
        assert read_source(tmp_path / "rows.csv").rows

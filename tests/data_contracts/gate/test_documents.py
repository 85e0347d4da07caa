"""JSON arrays and CSV tables as rows."""

from __future__ import annotations

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
        ("rows.json", '{\n "a": 1\n}', "one JSON object over several lines"),
        ("rows.json", "3", "is no JSON array"),
        ("rows.json", "", "is no JSON array"),
        ("rows.jsonl", json.dumps(ROWS), "is one JSON document"),
        ("rows.jsonl", json.dumps(ROWS, indent=1), "is one JSON document"),
        ("rows.jsonl", json.dumps(ROWS[0], indent=1), "is one JSON document"),
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


def test_a_file_that_is_not_utf8_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_bytes(b"a,b\n1,\xe4\n")
    with pytest.raises(ContractError, match="not UTF-8: byte 0xe4 in line 2"):
        assert read_source(tmp_path / "rows.csv").rows

"""Files as rows: lines, arrays, CSV tables, Parquet, and files that are refused."""

from __future__ import annotations

import codecs
import gzip
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st

from rlcore.data_contracts.errors import ContractError
from rlcore.data_contracts.gate.files import MAX_LINE_BYTES
from rlcore.data_contracts.gate.reading import joined, read_source, source_of
from rlcore.data_contracts.gate.records import SourceRow
from rlcore.data_contracts.gate.strict_json import MAX_DEPTH, parse_object


def nested(levels: int) -> bytes:
    return b'{"a": ' + b"[" * (levels - 1) + b"]" * (levels - 1) + b"}"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"a": NaN}', "NaN is not JSON"),
        (b'{"a": -Infinity}', "-Infinity is not JSON"),
        (b'{"a": 1e999}', "1e999 is beyond the range of a float"),
        (b'{"a": 1, "a": 2}', "duplicate key 'a'"),
        (b'{"b": {"a": 1, "a": 1}}', "duplicate key 'a'"),
        (b'{"a": 1, "\\u0061": 2}', "duplicate key 'a'"),
        (b'{"a": "\xff"}', "not UTF-8: byte 0xff at position 7"),
        (b'{"a": "\xed\xa0\x80"}', "not UTF-8: byte 0xed at position 7"),
        (b'{"a": "\\ud800"}', "a lone surrogate is no character"),
        (b'{"\\ud800": 1}', "a lone surrogate is no character"),
        (b'{"a": ["x\\u0000"]}', "a NUL character"),
        (b'{"a": 1', "malformed JSON: Expecting ',' delimiter at character 7"),
        (b'{"a": 1} {"a": 2}', "malformed JSON: Extra data at character 9"),
        (b'["a"]', "a row is a JSON object, and this is list"),
        (nested(MAX_DEPTH + 1), f"nested deeper than {MAX_DEPTH} levels"),
        (nested(100_000), f"nested deeper than {MAX_DEPTH} levels"),
        (b'{"a": ' + b"9" * 5000 + b"}", "4300"),  # an integer too long to convert
    ],
)
def test_what_other_parsers_let_through_is_refused(line: bytes, reason: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_object(line)
    assert str(caught.value) == reason or (reason == "4300" and reason in str(caught.value))


def test_a_backslash_before_u0000_is_text_and_nesting_is_allowed_up_to_the_limit() -> None:
    assert parse_object(b'{"a": "\\\\u0000"}') == {"a": "\\u0000"}
    parse_object(nested(MAX_DEPTH))
    assert parse_object(b'{"a": "' + b"[{" * 99 + b'"}') == {"a": "[{" * 99}


def test_bad_lines_are_set_aside_with_their_place_and_the_others_are_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    # Bytes before each line: 0, 9 (8 + line end), 10 (blank), 23 (12 + line end).
    path.write_bytes(b'{"a": 1}\n\n{"a": NaN}}\r\n{"a": 2}')
    source = read_source(path)
    assert [(row.origin.line, row.origin.offset, row.values) for row in source.rows] == [
        (1, 0, {"a": 1}),
        (4, 23, {"a": 2}),
    ]
    (bad,) = source.rejected
    assert (bad.origin.line, bad.origin.offset, bad.excerpt) == (3, 10, '{"a": NaN}}')
    assert bad.origin.digest == hashlib.sha256(b'{"a": NaN}}').hexdigest()


@given(st.lists(st.binary(max_size=12), max_size=12))
def test_every_line_is_a_row_or_set_aside_whatever_the_bytes(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes]
) -> None:
    path = tmp_path_factory.mktemp("bytes") / "rows.jsonl"
    path.write_bytes(b"\n".join([b"{}", *lines]))  # the first line may not begin as a compressed file does
    source = read_source(path)
    filled = [line for line in path.read_bytes().split(b"\n") if line.strip()]
    assert len(source.rows) + len(source.rejected) == len(filled)
    content = path.read_bytes()
    for one in source.rejected:
        line = content[one.origin.offset :].split(b"\n")[0].rstrip(b"\r")
        assert hashlib.sha256(line).hexdigest() == one.origin.digest


@pytest.mark.parametrize(("extra", "is_refused"), [(0, False), (1, True), (2, True), (1_500_000, True)])
def test_a_line_may_be_a_megabyte_and_not_a_byte_more(tmp_path: Path, extra: int, is_refused: bool) -> None:
    path = tmp_path / "rows.jsonl"
    long = b'{"a": "' + b"x" * (MAX_LINE_BYTES - 9 + extra) + b'"}'
    path.write_bytes(long + b'\n{"a": 2}\n')
    source = read_source(path)
    assert len(source.rejected) == int(is_refused)
    assert source.rows[-1].origin.line == 2
    assert source.rows[-1].origin.offset == len(long) + 1
    if is_refused:
        assert source.rejected[0].reason == "longer than 1000000 bytes"
        assert len(source.rejected[0].excerpt) == 200


@pytest.mark.parametrize(
    "damage", [lambda content: content[:-20], lambda content: content[:-40] + b"\xff" * 32 + content[-8:]]
)
def test_a_damaged_parquet_file_says_so(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"a": ["x"] * 1000}), path)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ContractError, match="not a readable Parquet file") as caught:
        read_source(path)
    assert caught.value.where == str(path)


def test_parquet_text_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    text = pa.Array.from_buffers(pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0"), pa.py_buffer(b"\xff")])
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"a": text}), path)
    with pytest.raises(ContractError, match="not a readable Parquet file"):
        assert read_source(path).rows


def test_a_missing_file_an_unknown_format_and_a_folder_say_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(ContractError, match="no such file") as caught:
        read_source(tmp_path / "none.jsonl")
    assert "JSONL" in caught.value.fix
    with pytest.raises(ContractError, match=r"the ending '\.txt' names no format"):
        read_source(tmp_path / "rows.txt")
    (tmp_path / "rows.jsonl").mkdir()
    with pytest.raises(ContractError, match="the folder has no file of rows"):
        read_source(tmp_path / "rows.jsonl")


def test_a_file_that_may_not_be_read_says_so(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}')
    path.chmod(0)
    user = os.geteuid()
    if user == 0:  # root may read anything: be nobody for a moment
        os.seteuid(65534)
    try:
        with pytest.raises(ContractError, match="cannot read the file: Permission denied") as caught:
            read_source(path)
    finally:
        os.seteuid(user)
    assert "permissions" in caught.value.fix


def test_a_pipe_and_a_device_are_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rows.jsonl")
    (tmp_path / "zero.jsonl").symlink_to("/dev/zero")
    for name in ("rows.jsonl", "zero.jsonl"):
        with pytest.raises(ContractError, match="is not a regular file") as caught:
            read_source(tmp_path / name)
        assert caught.value.where == str(tmp_path / name)


def test_a_byte_order_mark_costs_no_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(codecs.BOM_UTF8 + b'{"a": 1}\n' + codecs.BOM_UTF8 + b'{"a": 2}\n')
    source = read_source(path)
    assert [(row.values, row.origin.offset) for row in source.rows] == [({"a": 1}, 0), ({"a": 2}, 12)]
    assert source.rows[0].origin.digest == hashlib.sha256(b'{"a": 1}').hexdigest()


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_a_source_gives_the_lines_that_are_asked_for_with_their_places(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"rows.{ending}"
    if ending == "jsonl":
        path.write_text("".join(f'{{"a": {n}}}\n\n' for n in range(3000)))
    else:
        pq.write_table(pa.table({"a": list(range(3000))}), path)
    wanted = np.zeros(3000, dtype=bool)
    wanted[[0, 1500, 2999]] = True
    source = read_source(path)
    assert [(place, item.values) for place, item in source.read(wanted) if isinstance(item, SourceRow)] == [
        (place, {"a": place}) for place in (0, 1500, 2999)
    ]
    both = joined(source, source_of("more", [{"a": 1}, {"a": 2}]))
    found = [item for _, item in both.read(np.append(wanted, [False, True])) if isinstance(item, SourceRow)]
    assert [(one.values["a"], one.split, one.origin.source) for one in found[2:]] == [
        (2999, "train", path.name),
        (2, "eval", "more"),
    ]


def test_a_source_knows_when_its_file_has_changed(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}')
    source = read_source(path)
    before = source.state()
    assert source.state() == before
    path.write_text('{"a": 10}')
    assert source.state() != before


def packed(folder: Path, form: str, rows: list[dict[str, str]]) -> Path:
    """Rows in a form that users have: compressed, with tabs, in several files, or as a saved dataset."""
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path = folder / f"rows{form}"
    if form == ".jsonl.gz":
        path.write_bytes(gzip.compress(lines))
    elif form == ".jsonl.zst":
        with pa.CompressedOutputStream(str(path), "zstd") as file:
            file.write(lines)
    elif form == ".tsv":
        path.write_text("".join("\t".join(cells) + "\n" for cells in [rows[0].keys(), *(row.values() for row in rows)]))
    elif form == "saved":
        Dataset.from_list(rows).save_to_disk(folder / "saved")
        return folder / "saved"
    else:
        path = folder / "data"
        path.mkdir()
        for number, row in enumerate(rows):
            pq.write_table(pa.Table.from_pylist([row]), path / f"train-{number}-of-3.parquet")
        (path / "README.md").write_text("of the folder")
    return path / form if form == "*.parquet" else path


@pytest.mark.parametrize("form", [".jsonl.gz", ".jsonl.zst", ".tsv", "saved", "folder", "*.parquet"])
def test_rows_are_read_in_each_form_that_users_have(tmp_path: Path, form: str) -> None:
    rows = [{"q": f"Wh\u00fd {number}?", "a": str(number)} for number in range(3)]
    source = read_source(packed(tmp_path, form, rows))
    assert [row.values for row in source.rows] == rows
    wanted = [item for _, item in source.read(np.array([False, True, True]))]
    assert [item.values for item in wanted if isinstance(item, SourceRow)] == rows[1:]
    assert source.state() == read_source(Path(source.name)).state()


def test_what_cannot_be_one_table_of_rows_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "two" / "data").mkdir(parents=True)
    for name in ("data/train-0.jsonl", "data/test-0.jsonl"):
        (tmp_path / "two" / name).write_text("{}\n")
    (tmp_path / "none").mkdir()
    (tmp_path / "dict").mkdir()
    (tmp_path / "dict" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "state.json").write_text("{")
    (tmp_path / "rows.parquet.gz").write_bytes(b"")
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b"{}\n" * 99)[:20])
    for name, words in {
        "two": ["several splits", "data/train*", "data/test*"],
        "none": ["no file of rows", ".jsonl"],
        "dict": ["several splits", "dict/train", "dict/test"],
        "broken": ["save the dataset again"],
        "rows.parquet.gz": ["compressed inside", "gunzip"],
        "cut.jsonl.gz": ["not a readable .gz file"],
        "no*.jsonl": ["matches no file"],
    }.items():
        with pytest.raises(ContractError) as caught:
            _ = read_source(tmp_path / name).rows
        assert not [word for word in words if word not in str(caught.value)], str(caught.value)


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


@pytest.mark.parametrize(
    "values",
    [
        np.arange(500_000),
        pytest.param(np.broadcast_to(np.int8(0), 250_000_000), marks=pytest.mark.slow),  # small on disk, takes seconds
    ],
    ids=["many bytes", "many values"],
)
def test_a_group_described_as_larger_than_its_rows_can_be_is_refused(tmp_path: Path, values: Any) -> None:
    path = tmp_path / "rows.parquet"
    numbers = pa.ListArray.from_arrays(pa.array([0, len(values)]), pa.array(np.ascontiguousarray(values)))
    pq.write_table(pa.table({"numbers": numbers}), path)
    with pytest.raises(ContractError, match=f"row group 1 of 1 rows has {len(values)} values") as caught:
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

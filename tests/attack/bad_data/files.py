"""Errors of a file, or of a line before it is a row."""

from __future__ import annotations

import codecs
import json
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.attack.bad_data.case import LOOSE, Case, Expected, Quarantined, Refused, Sound, row, rows, write_lines

GOOD = json.dumps(row("prompts", "own", "Is this a question of its own?")).encode()


def cases() -> Iterator[Case]:
    yield from _lines()
    yield from _marks()
    yield from _no_files()
    yield from _parquet()


def _lines() -> Iterator[Case]:
    deep = b'{"a": ' + b"[" * 40 + b"]" * 40 + b"}"
    wrong: dict[str, tuple[bytes, str]] = {
        "half a line": (GOOD[:-9], "malformed JSON"),
        "two objects": (GOOD + b" " + GOOD, "malformed JSON"),
        "a comma too many": (GOOD[:-1] + b",}", "malformed JSON"),
        "single quotes": (GOOD.replace(b'"', b"'"), "malformed JSON"),
        "a comment": (b"// a comment", "malformed JSON"),
        "a list": (b"[1, 2]", "a row is a JSON object"),
        "a text": (b'"prompt"', "a row is a JSON object"),
        "null": (b"null", "a row is a JSON object"),
        "NaN": (GOOD[:-1] + b', "x": NaN}', "NaN is not JSON"),
        "infinity": (GOOD[:-1] + b', "x": -Infinity}', "is not JSON"),
        "beyond a float": (GOOD[:-1] + b', "x": 1e999}', "beyond the range"),
        "a long number": (GOOD[:-1] + b', "x": ' + b"9" * 5000 + b"}", "4300"),
        "a key twice": (GOOD[:-1] + b', "task": "t"}', "duplicate key 'task'"),
        "40 levels": (deep, "nested deeper than 32 levels"),
        "100,000 levels": (b'{"a": ' + b"[" * 10**5 + b"]" * 10**5 + b"}", "nested deeper"),
        "not UTF-8": (GOOD.replace(b"Is this", b"Is th\xffs"), "not UTF-8"),
        "Latin-1": (GOOD.replace(b"Is this", "Ça".encode("latin-1")), "not UTF-8"),
        "a coded surrogate": (GOOD.replace(b"Is this", b"\xed\xa0\x80"), "not UTF-8"),
        "half a pair": (GOOD.replace(b"Is this", b"\\ud83d"), "lone surrogate"),
        "NUL": (GOOD.replace(b"Is this", b"\\u0000"), "a NUL character"),
        "a raw NUL": (GOOD.replace(b"Is this", b"\0"), "malformed JSON"),
        "a raw tab in a text": (GOOD.replace(b"Is this", b"a\tb"), "malformed JSON"),
        "a megabyte and more": (GOOD.replace(b"Is this", b"x" * 1_000_001), "longer than 1000000 bytes"),
        "CSV": (b"prompt_id,question,reference", "malformed JSON"),
        "an object in Python": (b"{'prompt_id': None}", "malformed JSON"),
    }
    for name, (line, reason) in wrong.items():
        good = rows("prompts")
        found = Quarantined(line=5, field="", reason=reason)
        yield Case(family="a line", name=name, lines=[*good[:4], line, *good[4:]], settings=LOOSE, expected=[found])
    for name, line in {
        "a blank line": b"",
        "blanks": b"  \t",
        "a carriage return": b"\r",
        "a line of ours": GOOD,
    }.items():
        good = rows("prompts")
        yield Case(family="a line", name=name, lines=[*good[:4], line, *good[4:]], expected=[Sound()])


def _marks() -> Iterator[Case]:
    lines = [json.dumps(one).encode() for one in rows("prompts")]
    for name, content in {
        "a byte order mark": [codecs.BOM_UTF8 + lines[0], *lines[1:]],
        "files with marks, put together": [codecs.BOM_UTF8 + line for line in lines],
        "line ends of Windows": [line + b"\r" for line in lines],
    }.items():
        yield Case(family="a byte order mark", name=name, lines=content, expected=[Sound()])
    for name in ("utf-16", "utf-32", "utf-16-le"):
        content = b"\n".join(lines).decode().encode(name)
        yield _made("a byte order mark", name, _writer("rows.jsonl", content), Refused(words="none of its"))


def _made(family: str, name: str, prepare: Callable[[Path], Path], *expected: Expected) -> Case:
    return Case(family=family, name=name, prepare=prepare, expected=expected)


def _writer(name: str, content: bytes) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        (folder / name).write_bytes(content)
        return folder / name

    return write


def _linked(target: str) -> Callable[[Path], Path]:
    def link(folder: Path) -> Path:
        (folder / "rows.jsonl").symlink_to(target)
        return folder / "rows.jsonl"

    return link


def _pipe(folder: Path) -> Path:
    os.mkfifo(folder / "rows.jsonl")
    return folder / "rows.jsonl"


def _pipe_of_a_table(folder: Path) -> Path:
    os.mkfifo(folder / "rows.parquet")
    return folder / "rows.parquet"


def _socket(folder: Path) -> Path:
    where = os.open(folder, os.O_RDONLY)  # a socket's path is short
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(f"/proc/self/fd/{where}/rows.jsonl")
    os.close(where)
    return folder / "rows.jsonl"


def _folder(folder: Path) -> Path:
    (folder / "rows.jsonl").mkdir()
    return folder / "rows.jsonl"


def _no_files() -> Iterator[Case]:
    no_file = Refused(words="is not a regular file")
    yield _made("no file", "a pipe", _pipe, no_file)
    yield _made("no file", "a pipe named as a table", _pipe_of_a_table, no_file)
    yield _made("no file", "a socket", _socket, no_file)
    for device in ("zero", "null", "urandom", "full"):
        yield _made("no file", f"/dev/{device}", _linked(f"/dev/{device}"), no_file)
    yield _made("no file", "a folder", _folder, Refused(words="the folder has no file of rows"))
    yield _made("no file", "nothing", lambda folder: folder / "rows.jsonl", Refused(words="no such file"))
    yield _made("no file", "a link to nothing", _linked("nowhere.jsonl"), Refused(words="no such file"))
    yield _made("no file", "a link to itself", _linked("rows.jsonl"), Refused(words="symbolic links"))
    yield _made("no file", "an empty file", _writer("rows.jsonl", b""), Refused(words="it has no rows"))
    yield _made("no file", "blank lines", _writer("rows.jsonl", b"\n \n\n"), Refused(words="it has no rows"))
    yield _made("no file", "another ending", _writer("rows.ods", b"a\tb\n1\t2\n"), Refused(words="names no format"))


def _table(values: Mapping[str, Any]) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        pq.write_table(pa.table(values), folder / "rows.parquet")
        return folder / "rows.parquet"

    return write


def _cut(size: int) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        path = _table(_columns())(folder)
        path.write_bytes(path.read_bytes()[:size])
        return path

    return write


def _columns(**changes: Any) -> dict[str, Any]:
    good = rows("prompts")
    return {name: [one[name] for one in good] for name in good[0]} | changes


def _parquet() -> Iterator[Case]:
    yield _made("a table", "sound", _table(_columns()), Sound())
    for size in (0, 3, 100, -30, -4):
        yield _made("a table", f"cut at {size}", _cut(size), Refused(words="not a readable Parquet file"))
    yield _made("a table", "a JSONL file by another name", _writer("rows.parquet", GOOD), Refused(words="Parquet"))
    yield _made("a table", "no column of ours", _table({"x": [1, 2]}), Refused(words="missing column"))
    yield _made(
        "a table", "ids as numbers", _table(_columns(prompt_id=list(range(12)))), Refused(words="must be a text")
    )
    yield _made("a table", "texts as bytes", _table(_columns(task=[b"t"] * 12)), Refused(words="must be a text"))
    empty = pa.table({name: pa.array([], pa.string()) for name in ("prompt_id", "reference", "task")})
    yield _made("a table", "no row", lambda folder: _written(empty, folder), Refused(words="it has no rows"))
    damaged = pa.Array.from_buffers(pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0"), pa.py_buffer(b"\xff")])
    yield _made("a table", "text that is not UTF-8", _table({"prompt_id": damaged}), Refused(words="Parquet file"))
    one = write_lines  # a table that was written as lines
    yield _made(
        "a table",
        "lines named as a table",
        lambda folder: one(folder / "r.parquet", rows("prompts")),
        Refused(words="Parquet"),
    )


def _written(table: pa.Table, folder: Path) -> Path:
    pq.write_table(table, folder / "rows.parquet")
    return folder / "rows.parquet"

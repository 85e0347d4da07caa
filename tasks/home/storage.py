"""The one reader and writer of tables and JSON files. Every write is whole or absent: temporary, fsync, rename."""

from __future__ import annotations

import errno
import json
import os
import shutil
import uuid
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from rlcore.errors import StorageError
from tasks.home.artifacts import file_sha256
from tasks.home.disk import sync

_FIXES = {
    errno.ENOSPC: "free some space on that disk, or move the state folder to another one",
    errno.EDQUOT: "the quota is used up: free some space, or move the state folder to another disk",
    errno.EACCES: "give this user the right to read and write there, or name another folder",
    errno.EPERM: "give this user the right to read and write there, or name another folder",
    errno.EROFS: "the file system is read-only: name another folder",
    errno.ENOENT: "run the stage that writes it, or correct the path",
}


def write_table(frame: pd.DataFrame, path: Path) -> None:
    """Write a frame as Parquet, without its index; lists and {name: value} objects become nested columns.

    Raises:
        StorageError: a column mixes types, or the disk refuses.
    """
    buffer = pa.BufferOutputStream()
    try:
        pq.write_table(pa.Table.from_pandas(frame, preserve_index=False), buffer)
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise StorageError(
            f"the table cannot be stored: {error}", where=str(path), fix="give each column values of one type"
        ) from error
    write_bytes(buffer.getvalue().to_pybytes(), path)


def read_table(path: Path) -> pd.DataFrame:
    """Read a Parquet file; nested columns hold plain lists and dicts (pandas' own reader gives arrays).

    Raises:
        StorageError: missing, not permitted, or damaged.
    """
    try:
        with path.open("rb") as file:
            table = pq.read_table(file)
    except (OSError, pa.ArrowInvalid) as error:
        if isinstance(error, OSError) and error.strerror:
            raise _refusal("read", path, error) from error
        # pyarrow has OSErrors of its own, without a number: the bytes are wrong.
        raise StorageError(
            f"not a Parquet file: {error}", where=str(path), fix="run the stage that wrote it"
        ) from error
    columns = {
        name: pd.Series(column.to_pylist(), dtype=object)
        if pa.types.is_nested(column.type)
        else column.to_pandas(ignore_metadata=True)
        for name, column in zip(table.column_names, table.columns, strict=True)
    }
    return pd.DataFrame(columns, columns=table.column_names)


def write_json(value: Any, path: Path) -> None:
    """Write a JSON value, indented, with a line end.

    Raises:
        StorageError: the disk refuses, or the value has what JSON has not (NaN included).
    """
    try:
        text = json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise StorageError(f"the value is no JSON: {error}", where=str(path)) from error
    write_bytes(f"{text}\n".encode(), path)


def read_json(path: Path) -> Any:
    """Read a JSON value.

    Raises:
        StorageError: missing, not permitted, or damaged.
    """
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise _refusal("read", path, error) from error
    except ValueError as error:
        raise StorageError(f"not a JSON file: {error}", where=str(path), fix="run the stage that wrote it") from error


def write_bytes(content: bytes, path: Path) -> None:
    """Write a file so that a reader, or a crash at any moment, sees the old content or the new one.

    Raises:
        StorageError: the disk refuses; the old file, if any, is untouched and no temporary file is left.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        sync(path.parent)
    except OSError as error:
        raise _refusal("write", path, error) from error


def note_digest(path: Path) -> None:
    """Note beside a folder, in ``<folder>-digests``, what one of its files is: it has to be the same when it is used.

    Raises:
        StorageError: the disk refuses.
    """
    write_bytes(file_sha256(path).encode(), _digest_file(path))


def is_as_noted(path: Path) -> bool:
    """Whether a file is there and still what :func:`note_digest` has noted."""
    try:
        return _digest_file(path).read_text(encoding="utf-8") == file_sha256(path)
    except (OSError, ValueError):
        return False


def _digest_file(path: Path) -> Path:
    return path.parent.with_name(f"{path.parent.name}-digests") / path.name


def link_or_copy(source: Path, target: Path) -> None:
    """Give a file that nobody changes a second name; where the disk has no hard links, or is another one, copy it.

    Raises:
        StorageError: the disk refuses.
    """
    try:
        try:
            target.hardlink_to(source)
        except OSError:
            shutil.copyfile(source, target)
    except OSError as error:
        raise _refusal("write", target, error) from error


def _refusal(verb: str, path: Path, error: OSError) -> StorageError:
    reason = error.strerror or str(error)
    return StorageError(f"cannot {verb} the file: {reason}", where=str(path), fix=_FIXES.get(error.errno or 0, ""))

"""Files: tables and JSON, digests, links, and errors of a full disk from any writer: the system, SQLite, Arrow.

All writes are atomic: temporary file, fsync, rename. The libraries of tables are imported by the first table,
because most commands read JSON alone. A file that is missing, not permitted or damaged, a value that cannot be stored,
and a failed write are a StorageError with a fix.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import sqlite3
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from rlcore.errors import RlcoreError, StorageError

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa
    import pyarrow.parquet as pq

GROUP_ROWS = 16_384  # rows of a table that is written in parts
_NETWORK = {"nfs", "nfs4", "cifs", "smb3", "smbfs", "fuse.sshfs"}
_TEXTS = ("No space left on device", "database or disk is full", "Disk quota exceeded")  # of errors that hold only text

_FIXES = {
    errno.ENOSPC: "free some space on that disk, or move the state folder to another one",
    errno.EDQUOT: "the quota is used up: free some space, or move the state folder to another disk",
    errno.EACCES: "give this user the right to read and write there, or name another folder",
    errno.EPERM: "give this user the right to read and write there, or name another folder",
    errno.EROFS: "the file system is read-only: name another folder",
    errno.ENOENT: "run the stage that writes it, or correct the path",
}


def to_storage_error(verb: str, path: Path, error: OSError) -> StorageError:
    """Convert a file error of the system to a StorageError with a fix."""
    reason = error.strerror or str(error)
    return StorageError(f"cannot {verb} the file: {reason}", where=str(path), fix=_FIXES.get(error.errno or 0, ""))


def existing_parent(path: Path) -> Path:
    """Return a path if it exists, else the nearest folder above it that does."""
    return next(each for each in (path, *path.resolve().parents) if each.exists())


def network_file_system(path: Path) -> str:
    """Return the type of the file system of an existing path (``nfs4``), if it lies on another machine; else empty."""
    import psutil

    mounts = {Path(each.mountpoint): each.fstype for each in psutil.disk_partitions(all=True)}
    kind = next((mounts[each] for each in (path.resolve(), *path.resolve().parents) if each in mounts), "")
    return kind if kind in _NETWORK else ""


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to disk, so that a power cut cannot undo them."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def raise_on_full_disk(folder: Path) -> Iterator[None]:
    """Convert errors of a full disk within the block.

    Raises:
        StorageError: instead of an error that was caused by a full disk or quota.
    """
    try:
        yield
    except RlcoreError:
        raise
    except Exception as error:
        if not is_full_disk(error):
            raise
        raise StorageError(
            "the disk is full",
            where=str(folder),
            fix="make room there, or set RLCORE_HOME to a larger disk, then start again: finished stages are kept",
        ) from None


def is_full_disk(error: BaseException) -> bool:
    """Return True if the error, or one of its causes, was a full disk."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        no_space = isinstance(one, OSError) and one.errno in (errno.ENOSPC, errno.EDQUOT)
        full_base = isinstance(one, sqlite3.Error) and getattr(one, "sqlite_errorcode", 0) == sqlite3.SQLITE_FULL
        if no_space or full_base or any(text in str(one) for text in _TEXTS):
            return True
        waiting += [one.__cause__, one.__context__]
    return False


def write_table(frame: pd.DataFrame, path: Path) -> None:
    """Write a frame as Parquet without its index; lists and {name: value} objects become nested columns."""
    import pyarrow.parquet as pq

    with _whole_file(path) as file:
        pq.write_table(_arrow(frame, path), file)


@contextmanager
def table_writer(path: Path) -> Iterator[Callable[[pd.DataFrame], None]]:
    """Yield a function that appends frames to a table, which appears when the block ends without an error.

    Memory holds one group of rows. A table of one group has the bytes of :func:`write_table`.
    """
    import pandas as pd
    import pyarrow.parquet as pq

    with _whole_file(path) as file, ExitStack() as stack:
        waiting: list[pd.DataFrame] = []
        writer: pq.ParquetWriter | None = None

        def flush() -> None:
            nonlocal writer
            table = _arrow(pd.concat(waiting, ignore_index=True), path, writer.schema if writer else None)
            writer = writer or stack.enter_context(pq.ParquetWriter(file, table.schema))
            writer.write_table(table)
            waiting.clear()

        def add(frame: pd.DataFrame) -> None:
            waiting.append(frame)
            if sum(map(len, waiting)) >= GROUP_ROWS:
                flush()

        yield add
        if waiting:
            flush()


def read_column(path: Path, name: str) -> Iterator[list[Any]]:
    """Yield the values of one column of a Parquet file, some thousands at a time."""
    import pyarrow.parquet as pq

    with _readable(path), path.open("rb") as file:
        for batch in pq.ParquetFile(file).iter_batches(columns=[name]):
            yield batch.column(0).to_pylist()


def read_rows(path: Path, columns: Sequence[str]) -> list[dict[str, Any]]:
    """Read some columns of a Parquet file as rows of plain values."""
    import pyarrow.parquet as pq

    with _readable(path), path.open("rb") as file:
        rows: list[dict[str, Any]] = pq.read_table(file, columns=list(columns)).to_pylist()
    return rows


def read_table(path: Path) -> pd.DataFrame:
    """Read a Parquet file; nested columns hold plain lists and dicts (pandas' own reader gives arrays)."""
    import pandas as pd
    import pyarrow as pa
    import pyarrow.parquet as pq

    with _readable(path), path.open("rb") as file:
        table = pq.read_table(file)
    columns = {
        name: pd.Series(column.to_pylist(), dtype=object)
        if pa.types.is_nested(column.type)
        else column.to_pandas(ignore_metadata=True)
        for name, column in zip(table.column_names, table.columns, strict=True)
    }
    return pd.DataFrame(columns, columns=table.column_names)


def write_json(value: Any, path: Path) -> None:
    """Write a JSON value, indented, with a final newline; NaN is none."""
    try:
        text = json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise StorageError(f"the value is no JSON: {error}", where=str(path)) from error
    write_bytes(f"{text}\n".encode(), path)


def read_json(path: Path) -> Any:
    """Read a JSON value."""
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise to_storage_error("read", path, error) from error
    except ValueError as error:
        raise StorageError(f"not a JSON file: {error}", where=str(path), fix="run the stage that wrote it") from error


def write_bytes(content: bytes, path: Path) -> None:
    """Write a file atomically: readers, also after a crash, see the old or the new content.

    A failed write leaves no temporary file.
    """
    with _whole_file(path) as file:
        file.write(content)


def note_digest(path: Path) -> None:
    """Record the digest of a folder's file in ``<folder>-digests``, for a later check."""
    write_bytes(file_sha256(path).encode(), _digest_file(path))


def matches_digest(path: Path) -> bool:
    """Return True if a file exists and is unchanged since :func:`note_digest`."""
    try:
        return _digest_file(path).read_text(encoding="utf-8") == file_sha256(path)
    except (OSError, ValueError):
        return False


def _digest_file(path: Path) -> Path:
    return path.parent.with_name(f"{path.parent.name}-digests") / path.name


def link_or_copy(source: Path, target: Path) -> None:
    """Give an immutable file a second name, or copy it if the disk has no hard links or differs.

    The folder is made; an earlier file of that name goes first.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        try:
            target.hardlink_to(source)
        except OSError:
            shutil.copyfile(source, target)
    except OSError as error:
        raise to_storage_error("write", target, error) from error


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _whole_file(path: Path) -> Iterator[IO[bytes]]:
    """Yield a temporary file that replaces ``path`` when the block ends without an error."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        sync(path.parent)
    except OSError as error:
        raise to_storage_error("write", path, error) from error


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    import pyarrow as pa

    try:
        yield
    except (OSError, pa.ArrowInvalid) as error:
        if isinstance(error, OSError) and error.strerror:
            raise to_storage_error("read", path, error) from error
        # pyarrow has OSErrors without a number: the bytes are wrong.
        raise StorageError(
            f"not a Parquet file: {error}", where=str(path), fix="run the stage that wrote it"
        ) from error


def _arrow(frame: pd.DataFrame, path: Path, schema: pa.Schema | None = None) -> pa.Table:
    import pyarrow as pa

    try:
        return pa.Table.from_pandas(frame, schema=schema, preserve_index=False)
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise StorageError(
            f"the table cannot be stored: {error}", where=str(path), fix="give each column values of one type"
        ) from error


def flatten(value: Any, path: str = "") -> dict[str, Any]:
    """Flatten nested values: ``{"grpo": {"rewards": [{"weight": 1}]}}`` -> ``{"grpo.rewards.0.weight": 1}``."""
    flat: dict[str, Any] = {}
    if path or not isinstance(value, Mapping) or value:
        _add(flat, value, path)
    return flat


def _add(flat: dict[str, Any], value: Any, path: str) -> None:
    items: Iterable[tuple[Any, Any]] = ()
    if not isinstance(value, str | int | float):  # most are: a plan compares thousands of records
        if isinstance(value, Mapping):
            items = value.items()
        elif isinstance(value, list | tuple) and any(isinstance(item, Mapping) for item in value):
            items = enumerate(value)
    if not items:
        flat[path] = value
    for name, item in items:
        _add(flat, item, f"{path}.{name}" if path else str(name))

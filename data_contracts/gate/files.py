"""Files of rows, before any is read: which ones a path names, their formats, and compressed ones."""

from __future__ import annotations

import io
import json
import re
import stat
from glob import has_magic
from pathlib import Path
from typing import IO, Any

from rlcore.data_contracts.errors import ContractError

READERS = (
    "a JSONL file (one JSON object a line, ending .jsonl), a JSON array (.json), a Parquet file (.parquet), a table "
    "with a header (.csv, .tsv), these but Parquet with .gz or .zst, a pattern, or a folder of one split"
)
FORMATS = (".jsonl", ".json", ".parquet", ".csv", ".tsv", ".arrow")
MAX_LINE_BYTES = 1_000_000  # of a row
COMPRESSED = {".gz": "gzip", ".zst": "zstd"}
_STATE, _SPLITS = "state.json", "dataset_dict.json"  # of datasets.save_to_disk
_SPLIT = re.compile(r"(?<![a-z])(train|test|validation|valid|dev|eval)(?![a-z])")


def format_of(path: Path) -> str:
    """Return the ending that names the format of a file, without that of its compression; "" if it is unknown."""
    name = path.with_suffix("") if path.suffix in COMPRESSED else path
    return name.suffix if name.suffix in FORMATS else ""


def row_files(path: str | Path) -> list[Path]:
    """Return the files that a path names: itself, those that a pattern matches, or those of one split in a folder.

    Raises:
        ContractError: a folder without files of rows, or of several splits.
    """
    whole = Path(path)
    if whole.is_dir():
        return _files_in(whole)
    if has_magic(str(path)) and not whole.exists():
        start = whole.absolute()
        return sorted(each for each in Path(start.anchor).glob(str(start.relative_to(start.anchor))) if each.is_file())
    return [whole]


def _files_in(folder: Path) -> list[Path]:
    if (folder / _SPLITS).is_file():
        raise _several(folder, [str(folder / name) for name in _listed(folder / _SPLITS, "splits")])
    if (folder / _STATE).is_file():
        return [folder / each["filename"] for each in _listed(folder / _STATE, "_data_files")]
    found = sorted(each for each in folder.rglob("*") if each.is_file() and format_of(each))
    found = [each for each in found if not any(part.startswith(".") for part in each.relative_to(folder).parts)]
    if not found:
        raise ContractError("the folder has no file of rows", where=str(folder), fix=f"give {READERS}")
    if len({format_of(each) for each in found}) > 1:
        raise _several(folder, [str(each.parent / f"*{format_of(each)}") for each in found])
    names = [(each, _SPLIT.findall(str(each.relative_to(folder)).casefold())) for each in found]
    splits = {split: each for each, splits in names for split in splits[-1:]}
    if len(splits) > 1 or (splits and not all(found for _, found in names)):
        raise _several(folder, [str(each.with_name(f"{each.name.split('-')[0]}*")) for each in splits.values()])
    return found


def _listed(path: Path, key: str) -> list[Any]:
    try:
        return list(json.loads(path.read_bytes())[key])
    except (ValueError, KeyError, TypeError) as error:
        what = f"not a folder of datasets.save_to_disk: it has no {key}"
        raise ContractError(what, where=str(path), fix="save the dataset again") from error


def _several(folder: Path, paths: list[str]) -> ContractError:
    named = " or ".join(dict.fromkeys(paths)) or "the files of one"
    fix = f"set path to one of them, and eval_path to that of the held-out rows: {named}"
    return ContractError("the folder has several splits or formats", where=str(folder), fix=fix)


def opened(path: Path) -> IO[bytes]:
    """Open a file for reading, unpacked if its ending names a compression.

    Raises:
        OSError: it cannot be read.
    """
    if path.suffix not in COMPRESSED:
        return path.open("rb")
    import pyarrow as pa  # slow to import

    return io.BufferedReader(pa.input_stream(str(path), compression=COMPRESSED[path.suffix]))


def require_file(path: Path) -> None:
    """Reject a file that is not regular: reading a pipe blocks for ever, and a device may never end.

    Raises:
        ContractError: a pipe, a device or a socket.
        OSError: the path does not exist, or is not accessible.
    """
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # a folder raises an error later
        raise ContractError(f"{path} is not a regular file", where=str(path), fix=f"use {READERS}")

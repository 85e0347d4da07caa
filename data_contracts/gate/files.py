"""Files of rows, before any is opened."""

from __future__ import annotations

import stat
from pathlib import Path

from rlcore.data_contracts.errors import ContractError

READERS = (
    "a JSONL file (one JSON object a line, ending .jsonl), a JSON array (.json), a Parquet file (.parquet), or a CSV "
    "table with a header (.csv)"
)


def require_file(path: Path) -> None:
    """Reject a file that is not regular: reading a pipe blocks for ever, and a device may never end.

    Raises:
        ContractError: a pipe, a device or a socket.
        OSError: the path does not exist, or is not accessible.
    """
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # a folder raises an error later
        raise ContractError(f"{path} is not a regular file", where=str(path), fix=f"use {READERS}")

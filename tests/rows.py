"""Tables of tests as data: a file of JSON lines in the folder ``rows`` beside the test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def rows_of(test: str, table: str) -> list[dict[str, Any]]:
    """Return the rows of a table of the test file ``test``."""
    text = (Path(test).parent / "rows" / f"{table}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def cases(test: str, table: str) -> list[tuple[Any, ...]]:
    """Return the rows of a table as cases of ``pytest.mark.parametrize``; ``why`` is for the reader."""
    return [tuple(value for name, value in row.items() if name != "why") for row in rows_of(test, table)]

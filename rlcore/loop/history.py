"""Metrics of every iteration of a run, in memory and in an append-only file.

A checkpoint stores the file's length and digest, so its size does not grow with the number of iterations.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import overload

from rlcore.training.manifest import AppendOnlyFile, Seal

NAME = "history.jsonl"
Row = dict[str, float]


class History(Sequence[Row]):
    """Sequence of rows, one per iteration: its number under ``iteration``, and its metrics.

    Rows are built on access. Stored numbers take 8 bytes each, and rows share their names.
    """

    def __init__(self, folder: Path) -> None:
        self._lines = AppendOnlyFile(folder / NAME)
        self._names: list[tuple[str, ...]] = []
        self._values: list[array[float]] = []
        self._shared: dict[tuple[str, ...], tuple[str, ...]] = {}

    def append(self, row: Mapping[str, float]) -> None:
        """Add the row of an iteration."""
        self._keep(row)
        self._lines.add(json.dumps(self[-1]))

    def has(self, metric: str) -> bool:
        """Return True if any iteration has this metric."""
        return any(metric in names for names in self._shared)

    def seal(self) -> dict[str, Seal]:
        """Flush all rows to disk and return the length and digest of the file, by file name.

        Raises:
            StorageError: The disk is full or write-protected.
        """
        return {NAME: self._lines.seal()}

    def restore(self, sealed: Mapping[str, Seal]) -> None:
        """Restore the rows that :meth:`seal` covered, and drop later ones.

        Raises:
            CheckpointError: The file differs from what was sealed.
        """
        self._names, self._values, self._shared = [], [], {}
        for line in self._lines.restore(sealed.get(NAME)):
            self._keep(json.loads(line))

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        row = dict(zip(self._names[index], self._values[index], strict=True))
        return row | {"iteration": int(row["iteration"])}

    def __len__(self) -> int:
        return len(self._values)

    def _keep(self, row: Mapping[str, float]) -> None:
        names = tuple(row)
        self._names.append(self._shared.setdefault(names, names))
        self._values.append(array("d", row.values()))

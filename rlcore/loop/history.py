"""The metrics of every iteration of a run, in memory and in a file that only grows.

A checkpoint keeps the file's length and digest, so its size does not depend on the number of iterations.
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
    """One row for each iteration: its number under ``iteration``, and its metrics.

    A row is made when it is asked for. In between its numbers take 8 bytes each, and rows share their names.
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
        """Whether any iteration has this metric."""
        return any(metric in names for names in self._shared)

    def seal(self) -> dict[str, Seal]:
        """What a checkpoint keeps of it, by the file's name; every row is on the disk then.

        Raises:
            StorageError: the disk is full or refuses.
        """
        return {NAME: self._lines.seal()}

    def restore(self, sealed: Mapping[str, Seal]) -> None:
        """Go on with the rows that :meth:`seal` has sealed, and with nothing else.

        Raises:
            CheckpointError: the file is not what was sealed.
        """
        self._names, self._values, self._shared = [], [], {}
        for line in self._lines.restore(sealed.get(NAME)):
            self._keep(json.loads(line))

    @overload
    def __getitem__(self, place: int) -> Row: ...
    @overload
    def __getitem__(self, place: slice) -> list[Row]: ...
    def __getitem__(self, place: int | slice) -> Row | list[Row]:
        if isinstance(place, slice):
            return [self[each] for each in range(*place.indices(len(self)))]
        row = dict(zip(self._names[place], self._values[place], strict=True))
        return row | {"iteration": int(row["iteration"])}

    def __len__(self) -> int:
        return len(self._values)

    def _keep(self, row: Mapping[str, float]) -> None:
        names = tuple(row)
        self._names.append(self._shared.setdefault(names, names))
        self._values.append(array("d", row.values()))

"""Stream of contract rows from a source, a batch at a time, which can be read repeatedly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from rlcore.data_contracts.adapters.expressions import Row
from rlcore.data_contracts.errors import RowError
from rlcore.data_contracts.gate.reading import Source, Wanted
from rlcore.data_contracts.gate.records import Origin, Quarantined, SourceRow, excerpt

BATCH_ROWS, BATCH_CHARACTERS = 4_096, 2**24
HELD_BYTES, _ROW_BYTES, _TURN_BYTES = 2**26, 1_000, 300
RowFn = Callable[[Row], list[dict[str, Any]]]


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Rows in the order of their source. ``lines``: for each row, the index of its line in the source.

    ``rejected``: lines that never became rows. ``num_lines``: of both kinds.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    rejected: list[Quarantined] = field(default_factory=list)
    num_lines: int = 0


@dataclass(frozen=True, kw_only=True)
class RowStream:
    """Source and conversion to contract rows: ``make`` returns those of one source row.

    ``system``: the system prompt of conversations that have none; empty: none.
    """

    source: Source
    make: RowFn
    system: str = ""

    def batches(self, wanted: Wanted | None = None) -> Iterator[Batch]:
        """Yield all rows, or those of the lines in a mask; a few thousand, or some megabytes, at a time."""
        rows: list[dict[str, Any]] = []
        origins: list[Origin] = []
        lines: list[int] = []
        rejected: list[Quarantined] = []
        size = count = 0
        for line, item in self.source.read(wanted):
            made = self._made(item)
            count += 1
            if isinstance(made, Quarantined):
                rejected.append(made)
            else:
                rows += made
                origins += [item.origin] * len(made)
                lines += [line] * len(made)
                size += sum(len(turn["content"]) for row in made for turn in row["messages"])
            if len(rows) + len(rejected) >= BATCH_ROWS or size > BATCH_CHARACTERS:
                yield Batch(rows=rows, origins=origins, lines=lines, rejected=rejected, num_lines=count)
                rows, origins, lines, rejected, size, count = [], [], [], [], 0, 0
        yield Batch(rows=rows, origins=origins, lines=lines, rejected=rejected, num_lines=count)

    def _made(self, item: SourceRow | Quarantined) -> list[dict[str, Any]] | Quarantined:
        if isinstance(item, Quarantined):
            return item
        try:
            return [fill_defaults(row, item.split, self.system) for row in self.make(item.values)]
        except RowError as error:
            text = excerpt(error.value)
            return Quarantined(origin=item.origin, field=error.field, excerpt=text, reason=error.reason)


@dataclass(frozen=True, kw_only=True)
class HeldStream(RowStream):
    """Stream that is read once: after its first complete reading, up to 64 MiB of rows stay in memory.

    ``batches`` then yields all rows, whatever the mask.
    """

    held: list[Batch] = field(default_factory=list)

    @classmethod
    def of(cls, stream: RowStream) -> HeldStream:
        return cls(source=stream.source, make=stream.make, system=stream.system)

    def batches(self, wanted: Wanted | None = None) -> Iterator[Batch]:
        if self.held:
            yield from self.held
            return
        found, left = list[Batch](), HELD_BYTES if wanted is None else 0
        for batch in super().batches(wanted):
            left -= sum(map(_size, batch.rows)) if left > 0 else 0
            found = [*found, batch] if left > 0 else []
            yield batch
        self.held.extend(found)


def _size(row: dict[str, Any]) -> int:
    turns = sum([_TURN_BYTES + len(turn["content"]) for turn in row["messages"]])
    return _ROW_BYTES + turns + sum([len(value) for value in row.values() if type(value) is str])


def fill_defaults(row: dict[str, Any], split: str, system: str) -> dict[str, Any]:
    """Return a contract row with the side that its source is for, and with a system prompt.

    Raises:
        RowError: the row declares the other side.
    """
    if split and row.get("split", split) != split:
        raise RowError("split", f"its source is for {split!r}: leave eval_path or the column out", row["split"])
    given: dict[str, Any] = {"split": split} if split else {}
    messages = row["messages"]
    if system and not (messages and messages[0]["role"] == "system"):
        given["messages"] = [{"role": "system", "content": system}, *messages]
    return {**row, **given} if given else row

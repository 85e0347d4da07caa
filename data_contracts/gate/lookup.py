"""Rows of the ledger, read again from their source as far as needed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlcore.data_contracts.errors import ContractError
from rlcore.data_contracts.gate.ledger import Column, Ledger, Mask, Rows
from rlcore.data_contracts.gate.records import Origin
from rlcore.data_contracts.gate.row_hashes import parts_of
from rlcore.data_contracts.gate.stream import RowStream

_PARTS = 2**16  # rows that a line may make, generously


@dataclass(frozen=True, kw_only=True)
class Found:
    """Rows with their indices in the ledger."""

    places: Rows
    rows: list[dict[str, Any]]
    origins: list[Origin]

    def only(self, mask: Mask) -> Found:
        """Select rows by a mask."""
        hits = np.flatnonzero(mask).tolist()
        return Found(
            places=self.places[hits],
            rows=[self.rows[hit] for hit in hits],
            origins=[self.origins[hit] for hit in hits],
        )


def look_up(stream: RowStream, ledger: Ledger, places: Rows) -> Iterator[Found]:
    """Read the rows at ``places`` (ascending) in their order, a batch at a time.

    Raises:
        ContractError: some of them no longer exist.
    """
    if not len(places):
        return
    num_found = 0
    wanted = np.zeros(int(ledger.line[places[-1]]) + 1, dtype=bool)
    wanted[ledger.line[places]] = True
    codes = _codes(ledger.line[places], ledger.part[places])
    for batch in stream.batches(wanted):
        lines = np.array(batch.lines, dtype=np.int64)
        own = _codes(lines, parts_of(lines))
        at = np.minimum(np.searchsorted(codes, own), len(codes) - 1)
        found = Found(places=places[at], rows=batch.rows, origins=batch.origins).only(codes[at] == own)
        num_found += len(found.rows)
        yield found
    if num_found != len(places):
        raise source_changed_error(stream.source.name)


def source_changed_error(source: str) -> ContractError:
    """Return the error for a source that has changed between two reads."""
    return ContractError("the file changed while it was read", where=source, fix="run again")


def _codes(lines: Column, parts: Column) -> Rows:
    return lines * _PARTS + parts

"""Rows of the ledger as they stand in their source: it is read again, and no more of it than has to be."""

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

_PARTS = 2**16  # rows that a line may make, by far


@dataclass(frozen=True, kw_only=True)
class Found:
    """Some rows with their places in the ledger."""

    places: Rows
    rows: list[dict[str, Any]]
    origins: list[Origin]

    def only(self, mask: Mask) -> Found:
        """Those of them that a mask asks for."""
        hits = np.flatnonzero(mask).tolist()
        return Found(
            places=self.places[hits],
            rows=[self.rows[hit] for hit in hits],
            origins=[self.origins[hit] for hit in hits],
        )


def look_up(stream: RowStream, ledger: Ledger, places: Rows) -> Iterator[Found]:
    """The rows at ``places`` (ascending) in their order, a batch at a time.

    Raises:
        ContractError: not all of them are there any more.
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
    """The error of a source that is not read the second time as it was the first time."""
    return ContractError("the file changed while it was read", where=source, fix="run again")


def _codes(lines: Column, parts: Column) -> Rows:
    return lines * _PARTS + parts

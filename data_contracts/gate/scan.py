"""First scan of all rows: reasons to reject them, and their entries in the ledger."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from rlcore.data_contracts.contracts.contract import Contract
from rlcore.data_contracts.gate.ledger import Ledger, LedgerBuilder
from rlcore.data_contracts.gate.records import Quarantined
from rlcore.data_contracts.gate.row_hashes import hash_rows
from rlcore.data_contracts.gate.row_rules import RowCheckConfig, check_rows
from rlcore.data_contracts.gate.stream import RowStream
from rlcore.data_contracts.gate.token_budget import TokenMeter

MAX_LISTED = 100_000  # rejected rows that are listed; all of them are counted


@dataclass(frozen=True, kw_only=True)
class ScannedRows:
    """All rows as numbers, and the rejected ones.

    ``listed``: the entries of rejected rows, by row of the ledger. ``lost``: lines that never became rows, with
    ``lost_reasons`` of all. ``reasons``: the texts of the ledger's reasons. ``fatal``: rows that reject the dataset.
    ``lines_read``: lines of the source; ``merged``: removed rows that were equal to another.
    """

    ledger: Ledger
    listed: Mapping[int, Quarantined]
    lost: Sequence[Quarantined]
    lost_reasons: Counter[str]
    reasons: Sequence[str]
    fatal: Sequence[str]
    lines_read: int
    merged: int


@dataclass(kw_only=True)
class _ScanStats:
    """Counts and rejected rows that are collected while the ledger grows, by index in the stream."""

    listed: dict[int, tuple[Quarantined, bool]] = field(default_factory=dict)
    lost: list[Quarantined] = field(default_factory=list)
    lost_reasons: Counter[str] = field(default_factory=Counter)
    reasons: dict[str, int] = field(default_factory=lambda: {"": 0})
    rows: int = 0
    lines: int = 0


def scan_rows(stream: RowStream, contract: Contract, terms: RowCheckConfig, *, meter: TokenMeter) -> ScannedRows:
    """Scan each row once, a batch at a time.

    Raises:
        ContractError: the source cannot be read, or a column is missing or unknown: no row can be checked.
    """
    builder, notes = LedgerBuilder(), _ScanStats()
    for batch in stream.batches():
        checked = check_rows(batch, contract, terms, meter=meter, where=stream.source.name)
        reason = np.zeros(len(batch.rows), dtype=np.int32)
        for place, (entry, is_fatal) in checked.refused.items():
            reason[place] = notes.reasons.setdefault(entry.reason, len(notes.reasons))
            if is_fatal or len(notes.listed) < MAX_LISTED:
                notes.listed[notes.rows + place] = entry, is_fatal
        columns, digests = hash_rows(batch, contract, terms)
        builder.add({**columns, "reason": reason, "lengths": checked.lengths}, digests)
        notes.rows, notes.lines = notes.rows + len(batch.rows), notes.lines + batch.num_lines
        notes.lost_reasons.update(one.reason for one in batch.rejected)
        notes.lost += batch.rejected[: max(0, MAX_LISTED - len(notes.lost))]
    ledger, is_first = builder.finish()
    places = np.cumsum(is_first) - 1
    first = {int(places[row]): found for row, found in notes.listed.items() if is_first[row]}
    return ScannedRows(
        ledger=ledger,
        listed={row: entry for row, (entry, _) in first.items()},
        lost=notes.lost,
        lost_reasons=notes.lost_reasons,
        reasons=list(notes.reasons),
        fatal=[str(entry) for entry, is_fatal in first.values() if is_fatal],
        lines_read=notes.lines,
        merged=notes.rows - len(ledger),
    )

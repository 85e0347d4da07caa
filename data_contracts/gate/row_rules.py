"""Checks of a single row: contract, token budget, visually equal answers, and the caller's filter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rlcore.data_contracts.contracts.contract import WHOLE_FRAME, Contract, RowViolation, row_violations
from rlcore.data_contracts.errors import ContractError
from rlcore.data_contracts.gate.records import Origin, Quarantined, excerpt
from rlcore.data_contracts.gate.stream import Batch
from rlcore.data_contracts.gate.token_budget import UNKNOWN, Lengths, TokenMeter, measure
from rlcore.data_contracts.text import visible_form

RowFilter = Callable[[Sequence[str]], Mapping[int, str]]


@dataclass(frozen=True, kw_only=True)
class RowCheckConfig:
    """Settings of row checks.

    ``max_tokens``: budget of one row. ``seed``: selects the training prompts if there are more. ``is_exact``: texts are
    compared by every character. ``keeps_apart``: search for near duplicates of evaluation prompts. ``screen``: a filter
    of valid rows by their references, which returns reasons against some of them by index; the part of a reason behind
    a colon belongs to that row alone, and is shown instead of the reference.
    """

    max_tokens: int
    seed: int = 0
    is_exact: bool = False
    keeps_apart: bool = True
    screen: RowFilter | None = None


@dataclass(frozen=True, kw_only=True)
class CheckedRows:
    """Checked batch: rejected rows by index, with True if a row rejects the dataset; lengths of other rows."""

    refused: Mapping[int, tuple[Quarantined, bool]]
    lengths: Lengths


def check_rows(
    batch: Batch, contract: Contract, terms: RowCheckConfig, *, meter: TokenMeter, where: str
) -> CheckedRows:
    """Apply each kind of rule to the rows that the one before accepted.

    Raises:
        ContractError: a column is missing or unknown: no row can be checked.
    """
    rows = batch.rows
    lengths = np.full((len(rows), 1 + len(contract.answers)), UNKNOWN, dtype=np.int32)
    if not rows:
        return CheckedRows(refused={}, lengths=lengths)
    broken = row_violations([{"split": "train", **row} for row in rows], contract)
    _require_columns(broken, where)
    left = _left(rows, broken)
    lengths[left], found = measure([rows[place] for place in left], contract, meter, max_tokens=terms.max_tokens)
    broken += _placed(found, left)
    if not terms.is_exact and len(contract.answers) == 2:
        left = _left(rows, broken)
        broken += _placed(_alike([rows[place] for place in left], contract.answers), left)
    if terms.screen:
        left = _left(rows, broken)
        reasons = terms.screen([rows[place]["reference"] for place in left])
        for place, text in reasons.items():
            reason, _, detail = text.partition(": ")
            value = detail or rows[left[place]]["reference"]
            broken.append(RowViolation(row=left[place], field="reference", value=value, reason=reason))
    return CheckedRows(refused=quarantine(broken, batch.origins), lengths=lengths)


def contract_violations(
    rows: Sequence[dict[str, Any]], origins: Sequence[Origin], contract: Contract
) -> dict[int, Quarantined]:
    """Return the rows that break their contract, by index. Other rules need a tokenizer, or other rows."""
    if not rows:
        return {}
    broken = row_violations([{"split": "train", **row} for row in rows], contract)
    found = [one for one in broken if one.row != WHOLE_FRAME]
    return {row: entry for row, (entry, _) in quarantine(found, origins).items()}


def quarantine(broken: Sequence[RowViolation], origins: Sequence[Origin]) -> dict[int, tuple[Quarantined, bool]]:
    """Return an entry per row: its first field and value, and all its reasons; and True if one of them is fatal."""
    by_row: dict[int, list[RowViolation]] = {}
    for one in broken:
        by_row.setdefault(one.row, []).append(one)
    return {row: (_entry(found, origins[row]), any(one.is_fatal for one in found)) for row, found in by_row.items()}


def _entry(found: Sequence[RowViolation], origin: Origin) -> Quarantined:
    reason = "; ".join(dict.fromkeys(one.reason for one in found))
    return Quarantined(origin=origin, field=found[0].field, excerpt=excerpt(found[0].value), reason=reason)


def _alike(rows: Sequence[dict[str, Any]], answers: Sequence[str]) -> list[RowViolation]:
    chosen, rejected = answers
    return [
        RowViolation(row=place, field=rejected, value=row[rejected], reason="chosen and rejected look the same")
        for place, row in enumerate(rows)
        if visible_form(row[chosen]) == visible_form(row[rejected])
    ]


def _left(rows: Sequence[dict[str, Any]], broken: Sequence[RowViolation]) -> list[int]:
    refused = {one.row for one in broken}
    return [place for place in range(len(rows)) if place not in refused]


def _placed(found: Sequence[RowViolation], places: Sequence[int]) -> list[RowViolation]:
    return [replace(one, row=places[one.row]) for one in found]


def _require_columns(broken: Sequence[RowViolation], source: str) -> None:
    whole = [f"{one.value}: {one.reason}" for one in broken if one.row == WHOLE_FRAME]
    if whole:
        raise ContractError(f"the columns are not those of the contract: {'; '.join(whole[:3])}", where=source)

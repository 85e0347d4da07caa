"""A contract: a named, versioned pandera model of rows, and how its complaints become (row, field, reason)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pandas as pd
import pandera.pandas as pa

from data_contracts.errors import ContractError
from data_contracts.quick import surely_holds

WHOLE_FRAME = -1


@dataclass(frozen=True, kw_only=True)
class Contract:
    """What rows of one kind must be.

    ``name`` carries the version (``prompts/v1``): columns or rules that change make a new version. ``id_column`` names
    a row, ``answers`` are the columns that hold completions, in the order in which they are compared.
    """

    name: str
    model: type[pa.DataFrameModel]
    id_column: str
    answers: tuple[str, ...] = ()

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns, in their order."""
        return tuple(self.model.to_schema().columns)


@dataclass(frozen=True, kw_only=True, slots=True)
class RowComplaint:
    """One broken rule; ``row`` is a position in the frame, or ``WHOLE_FRAME``. A fatal one refuses the dataset."""

    row: int
    field: str
    value: Any
    reason: str
    is_fatal: bool = False


def complaints(frame: pd.DataFrame, contract: Contract) -> list[RowComplaint]:
    """Every row rule that a frame breaks, one entry per row and rule, by row; the frame's index must be 0, 1, 2, ….

    Never pandera's ``drop_invalid_rows``: it drops in silence.
    """
    misfits = _column_complaints(frame, contract)
    if misfits:  # rules over several columns would stumble over a missing one
        return misfits
    if frame.columns.is_unique and surely_holds(frame, contract.model):
        return []
    try:
        contract.model.validate(frame, lazy=True)
    except pa.errors.SchemaErrors as error:
        cases = error.failure_cases
    else:
        return []
    # A rule over several columns is reported once for each of them; one complaint is enough.
    over_row = cases["schema_context"] == "DataFrameSchema"
    cases = cases.assign(column=cases["column"].where(~over_row | cases["index"].isna(), "row"))
    cases = cases.drop_duplicates(subset=["index", "column", "check"])
    found = [
        RowComplaint(
            row=WHOLE_FRAME if pd.isna(row) else int(row), field=str(field), value=value, reason=_reason(str(check))
        )
        for row, field, value, check in cases[["index", "column", "failure_case", "check"]].itertuples(index=False)
    ]
    return sorted(found, key=lambda complaint: complaint.row)


def _column_complaints(frame: pd.DataFrame, contract: Contract) -> list[RowComplaint]:
    reasons = {name: "a column of the contract is missing" for name in contract.columns if name not in frame}
    reasons |= {
        name: "a column that the contract does not know" for name in map(str, frame) if name not in contract.columns
    }
    return [RowComplaint(row=WHOLE_FRAME, field=name, value=name, reason=why) for name, why in reasons.items()]


def _reason(check: str) -> str:
    """pandera's names of its own checks, in words."""
    if check.startswith("dtype("):
        return "is not of the column's type"
    return "must not be null" if check == "not_nullable" else check


def require(frame: pd.DataFrame, contract: Contract) -> None:
    """Refuse a frame that we made ourselves: a broken rule is a fault of the program, so nothing is quarantined.

    Raises:
        ContractError: no rows, or broken rules, of which the first three are named.
    """
    if frame.empty:
        raise ContractError(f"{contract.name}: there are no rows")
    found = complaints(frame.reset_index(drop=True), contract)
    if found:
        first = "; ".join(
            f"{'frame' if item.row == WHOLE_FRAME else f'row {item.row}'}, {item.field}: {item.reason} "
            f"({item.value!r:.80})"
            for item in found[:3]
        )
        raise ContractError(f"{contract.name}: {len(found)} broken rules: {first}", where=contract.name)

"""Contract: a named, versioned pandera model of rows; violations are reported as (row, field, reason).

A fast path checks a frame first. pandera copies the frame and each column's schema and collects the failure cases while
it checks: 0.1 s for 128 rows, which was a fourteenth of a small iteration of RL. Checking the same types and rules one
by one costs a tenth. A frame that the fast path does not accept is checked by pandera, whose report counts. Models
have only columns, types, nulls and checks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import pandera.pandas as pa
from numpy.typing import NDArray
from pandera.dtypes import String
from pandera.engines.pandas_engine import Engine

from rlcore.data_contracts.errors import ContractError

WHOLE_FRAME = -1


@dataclass(frozen=True, kw_only=True)
class Contract:
    """Versioned schema of rows of one kind.

    ``name`` includes the version (``prompts/v1``): changed columns or rules make a new version. ``id_column`` names a
    row; ``answers`` are the columns with completions, in the order of comparison. ``carried`` are columns that travel
    with a row into the snapshot, and that no rule reads; rows that differ in them alone are equal. ``keys``: columns in
    which no two rows of a table that rlcore made are equal.
    """

    name: str
    model: type[pa.DataFrameModel]
    id_column: str
    answers: tuple[str, ...] = ()
    carried: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns, in their order."""
        return tuple(self.model.to_schema().columns)


@dataclass(frozen=True, kw_only=True, slots=True)
class RowViolation:
    """Broken rule; ``row`` is an index in the frame, or ``WHOLE_FRAME``. A fatal one rejects the dataset."""

    row: int
    field: str
    value: Any
    reason: str
    is_fatal: bool = False


def violations(frame: pd.DataFrame, contract: Contract) -> list[RowViolation]:
    """Return an entry per row and broken rule, by row; the frame's index must be 0, 1, 2, ….

    pandera's ``drop_invalid_rows`` is not used, because it drops silently.
    """
    misfits = _column_violations(frame, contract)
    if misfits:  # rules over several columns fail if one is missing
        return misfits
    if frame.columns.is_unique and passes_fast_path(frame, contract.model):
        return []
    return _reported(frame, contract)


def row_violations(rows: Sequence[Mapping[str, Any]], contract: Contract) -> list[RowViolation]:
    """Return :func:`violations` of rows, of which pandera sees only those that the fast path does not accept.

    The contract's rules must be about single rows. Texts stay Python's: a frame's text columns would copy them twice.
    """
    columns: dict[str, Any] = {name: [row.get(name) for row in rows] for name in contract.columns}
    kinds = {name: {*map(type, values)} for name, values in columns.items()}
    texts = {name: pd.Series(columns[name], dtype=object) for name, kind in kinds.items() if kind in ({str}, {list})}
    # values of one type have one type in every part of the frame
    is_uniform = all(len(kind) == 1 for kind in kinds.values())
    is_suspect = _suspects(pd.DataFrame({**columns, **texts}), contract.model) if is_uniform else None
    places = list(range(len(rows))) if is_suspect is None else np.flatnonzero(is_suspect).tolist()
    if not places:
        return []
    found = _reported(pd.DataFrame([rows[place] for place in places], columns=list(contract.columns)), contract)
    return [one if one.row == WHOLE_FRAME else replace(one, row=places[one.row]) for one in found]


def _suspects(frame: pd.DataFrame, model: type[pa.DataFrameModel]) -> NDArray[np.bool_] | None:
    schema = model.to_schema()
    if not all(_has_type(frame[name], column) for name, column in schema.columns.items()):
        return None
    checks = [(check, frame[name]) for name, column in schema.columns.items() for check in column.checks]
    found = np.zeros(len(frame), dtype=bool)
    try:
        for check, values in [*checks, *((check, frame) for check in schema.checks)]:
            if check.groupby is not None or check.element_wise:
                return None
            found |= ~np.broadcast_to(np.asarray(check._check_fn(values), dtype=bool), len(frame))
    except Exception:  # noqa: BLE001 - pandera reports a check that fails on a value as a broken rule
        return None
    return found


def _reported(frame: pd.DataFrame, contract: Contract) -> list[RowViolation]:
    try:
        contract.model.validate(frame, lazy=True)
    except pa.errors.SchemaErrors as error:
        cases = error.failure_cases
    else:
        return []
    # A rule over several columns is reported once for each of them; one violation is enough.
    over_row = cases["schema_context"] == "DataFrameSchema"
    cases = cases.assign(column=cases["column"].where(~over_row | cases["index"].isna(), "row"))
    cases = cases.drop_duplicates(subset=["index", "column", "check"])
    found = [
        RowViolation(
            row=WHOLE_FRAME if pd.isna(row) else int(row), field=str(field), value=value, reason=_reason(str(check))
        )
        for row, field, value, check in cases[["index", "column", "failure_case", "check"]].itertuples(index=False)
    ]
    return sorted(found, key=lambda complaint: complaint.row)


def passes_fast_path(frame: pd.DataFrame, model: type[pa.DataFrameModel]) -> bool:
    """Return True only if pandera would accept the frame. It must have each of the model's columns once."""
    found = _suspects(frame, model)
    return found is not None and not found.any()


def _has_type(values: pd.Series, column: pa.Column) -> bool:
    kind: Any = column.dtype
    if not column.nullable and values.hasnans:
        return False
    if kind is None or (isinstance(kind, String) and values.dtype == object and {*map(type, values)} == {str}):
        return True
    # one result for the whole column, or one for each value
    return bool(np.all(np.asarray(kind.check(Engine.dtype(values.dtype), values))))


def _column_violations(frame: pd.DataFrame, contract: Contract) -> list[RowViolation]:
    reasons = {name: "a column of the contract is missing" for name in contract.columns if name not in frame}
    reasons |= {
        name: "a column that the contract does not know" for name in map(str, frame) if name not in contract.columns
    }
    return [RowViolation(row=WHOLE_FRAME, field=name, value=name, reason=why) for name, why in reasons.items()]


def _reason(check: str) -> str:
    if check.startswith("dtype("):
        return "is not of the column's type"
    return "must not be null" if check == "not_nullable" else check


def require(frame: pd.DataFrame, contract: Contract) -> None:
    """Check a frame that rlcore made: a broken rule is a bug, so nothing is quarantined.

    Raises:
        ContractError: no rows, broken rules, of which the first three are named, or rows that are there twice.
    """
    if frame.empty:
        raise ContractError(f"{contract.name}: there are no rows")
    found = violations(frame.reset_index(drop=True), contract)
    if found:
        first = "; ".join(
            f"{'frame' if item.row == WHOLE_FRAME else f'row {item.row}'}, {item.field}: {item.reason} "
            f"({item.value!r:.80})"
            for item in found[:3]
        )
        raise ContractError(f"{contract.name}: {len(found)} broken rules: {first}", where=contract.name)
    keys = list(contract.keys)
    if keys and len(repeated := frame[frame.duplicated(keys)]):
        what = f"{len(repeated)} rows are there twice, first {(*repeated[keys].to_dict('records')[0].values(),)}"
        raise ContractError(f"{contract.name}: {what}", where=contract.name)

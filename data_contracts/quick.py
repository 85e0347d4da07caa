"""Whether a frame surely keeps a contract, by pandera's own rules but without the report that pandera prepares.

pandera copies the frame and each column's schema and collects the cases at fault while it looks: 0.1 s for 128 rows,
which was a fourteenth of a small iteration of RL. Asking the same types and the same checks one by one costs a tenth.
"No" says nothing: the caller has pandera look again, whose verdict and report count.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pandas as pd
import pandera.pandas as pa
from pandera.engines.pandas_engine import Engine

# What a schema may ask for beside types, nulls and checks; none of our contracts does.
_OF_FRAME = ("dtype", "index", "coerce", "ordered", "unique", "parsers", "add_missing_columns", "drop_invalid_rows")
_OF_COLUMN = ("regex", "coerce", "unique", "parsers", "default", "drop_invalid_rows")


def surely_holds(frame: pd.DataFrame, model: type[pa.DataFrameModel]) -> bool:
    """True only where pandera would let the frame pass. The frame must have each of the model's columns once."""
    schema = model.to_schema()
    if not is_plain(model):
        return False
    try:
        return all(_column_holds(frame[name], column) for name, column in schema.columns.items()) and all(
            bool(check(frame).check_passed) for check in schema.checks
        )
    except Exception:  # noqa: BLE001 - a check that stumbles over a value is pandera's to report, as a broken rule
        return False


@cache
def is_plain(model: type[pa.DataFrameModel]) -> bool:
    """Whether a model asks for nothing but its columns, their types, no nulls, and checks."""
    schema = model.to_schema()
    plain_frame = schema.strict is True and not any(getattr(schema, name) for name in _OF_FRAME)
    return plain_frame and all(
        column.required and not any(getattr(column, name) for name in _OF_COLUMN) for column in schema.columns.values()
    )


def _column_holds(values: pd.Series, column: pa.Column) -> bool:
    if not column.nullable and values.hasnans:
        return False
    # One verdict for the whole column, or one for each value.
    if column.dtype is not None and not np.all(np.asarray(column.dtype.check(Engine.dtype(values.dtype), values))):
        return False
    return all(bool(check(values).check_passed) for check in column.checks)

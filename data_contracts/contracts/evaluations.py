"""``evaluations/v2``: all answers of a held-out evaluation with their scores."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pandera.pandas as pa

from rlcore.data_contracts.contracts import column_checks
from rlcore.data_contracts.contracts.contract import Contract

NAME = "evaluations/v2"
MODES = ("greedy", "sampled")


class Evaluations(pa.DataFrameModel):
    """One row per answer.

    ``is_graded``: the answer counts in accuracies; answers to problems without the reference answer that their verifier
    needs do not. ``value``: the verifier's score, null if it failed (then ``correct`` is false). ``num_tokens``: length
    of the completion; ``finish_reason`` ``length`` means truncated by the token limit.
    """

    prompt_id: str
    task: str
    mode: str
    sample_index: int
    is_graded: bool
    correct: bool
    value: float = pa.Field(nullable=True)
    completion: str
    num_tokens: int
    finish_reason: str

    class Config:
        strict = True
        name = NAME

    @pa.check("prompt_id", "task", error="must not be blank")
    @classmethod
    def names_are_filled(cls, texts: pd.Series) -> pd.Series:
        return column_checks.is_filled(texts)

    @pa.check("mode", error="must be 'greedy' or 'sampled'")
    @classmethod
    def mode_is_known(cls, values: pd.Series) -> pd.Series:
        return values.isin(MODES)

    @pa.check("sample_index", "num_tokens", error="must be at least 0")
    @classmethod
    def counts_are_counts(cls, values: pd.Series) -> pd.Series:
        return values >= 0

    @pa.check("value", error="must be finite")
    @classmethod
    def value_is_finite(cls, values: pd.Series) -> pd.Series:
        return values.abs() < np.inf

    @pa.check("finish_reason", error="must be 'stop' or 'length'")
    @classmethod
    def finish_reason_is_known(cls, values: pd.Series) -> pd.Series:
        return column_checks.is_finish_reason(values)

    @pa.dataframe_check(error="is called correct without a value")
    @classmethod
    def correct_was_judged(cls, frame: pd.DataFrame) -> pd.Series:
        return ~frame["correct"] | frame["value"].notna()


CONTRACT = Contract(
    name=NAME,
    model=Evaluations,
    id_column="prompt_id",
    answers=("completion",),
    keys=("prompt_id", "mode", "sample_index"),
)

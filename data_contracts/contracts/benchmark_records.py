"""``benchmark_records/v1``: scores of a checkpoint on each document of a benchmark."""

from __future__ import annotations

import pandas as pd
import pandera.pandas as pa

from rlcore.data_contracts.contracts import column_checks
from rlcore.data_contracts.contracts.contract import Contract

NAME = "benchmark_records/v1"


class BenchmarkRecords(pa.DataFrameModel):
    """One row for each task, document and metric.

    ``doc_id``: the document's number within the task; ``doc_sha256``: of its text. Two checkpoints are compared only on
    equal documents. ``metric``: its name and the filter of the answer; ``value``: the score.
    """

    task: str
    doc_id: int = pa.Field(ge=0)
    doc_sha256: str = pa.Field(str_matches=r"^[0-9a-f]{64}$")
    metric: str
    value: float

    class Config:
        strict = True
        name = NAME

    @pa.check("task", "metric", error="must not be blank")
    @classmethod
    def names_are_filled(cls, texts: pd.Series) -> pd.Series:
        return column_checks.is_filled(texts)


CONTRACT = Contract(name=NAME, model=BenchmarkRecords, id_column="task", keys=("task", "doc_id", "metric"))

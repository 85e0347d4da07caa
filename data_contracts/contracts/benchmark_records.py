"""``benchmark_records/v1``: scores of a checkpoint on each document of a benchmark."""

from __future__ import annotations

import pandera.pandas as pa

from rlcore.data_contracts.contracts.column_checks import filled
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

    names_are_filled = filled("task", "metric")


CONTRACT = Contract(name=NAME, model=BenchmarkRecords, id_column="task", keys=("task", "doc_id", "metric"))

"""Contracts of measurements: ``evaluations/v2``, ``difficulties/v1`` and ``benchmark_records/v1``."""

from __future__ import annotations

import numpy as np
import pandera.pandas as pa

from rlcore.data_contracts.contracts.column_checks import filled, known_finish_reason, rule
from rlcore.data_contracts.contracts.contract import Contract

MODES = ("greedy", "sampled")


class Evaluations(pa.DataFrameModel):
    """One row per answer of a held-out evaluation.

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
        name = "evaluations/v2"

    names_are_filled = filled("prompt_id", "task")
    mode_is_known = rule(lambda values: values.isin(MODES), "mode", error="must be 'greedy' or 'sampled'")
    counts_are_counts = rule(lambda values: values >= 0, "sample_index", "num_tokens", error="must be at least 0")
    value_is_finite = rule(lambda values: values.abs() < np.inf, "value", error="must be finite")
    finish_reason_is_known = known_finish_reason("finish_reason")
    correct_was_judged = rule(
        lambda frame: ~frame["correct"] | frame["value"].notna(), error="is called correct without a value"
    )


class Difficulties(pa.DataFrameModel):
    """One row per prompt.

    ``dataset``, ``prompt_id``: the prompt's name in its dataset. ``answers``: number of scored answers; ``passed``: of
    those that reach the threshold; ``pass_rate``: their fraction, ``low`` and ``high`` its Wilson interval. ``reward``:
    mean score.
    """

    dataset: str
    prompt_id: str
    task: str
    answers: int = pa.Field(ge=1)
    passed: int = pa.Field(ge=0)
    pass_rate: float = pa.Field(ge=0, le=1)
    low: float = pa.Field(ge=0, le=1)
    high: float = pa.Field(ge=0, le=1)
    reward: float

    class Config:
        strict = True
        name = "difficulties/v1"

    names_are_filled = filled("dataset", "prompt_id", "task")
    figures_fit = rule(
        lambda frame: (
            (frame["passed"] / frame["answers"] == frame["pass_rate"])
            & (frame["low"] <= frame["pass_rate"])
            & (frame["pass_rate"] <= frame["high"])
        ),
        error="pass_rate is not passed / answers, or lies outside its interval",
    )


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
        name = "benchmark_records/v1"

    names_are_filled = filled("task", "metric")


EVALUATIONS = Contract(
    name="evaluations/v2",
    model=Evaluations,
    id_column="prompt_id",
    answers=("completion",),
    keys=("prompt_id", "mode", "sample_index"),
)
DIFFICULTIES = Contract(
    name="difficulties/v1", model=Difficulties, id_column="prompt_id", keys=("dataset", "prompt_id")
)
BENCHMARK_RECORDS = Contract(
    name="benchmark_records/v1", model=BenchmarkRecords, id_column="task", keys=("task", "doc_id", "metric")
)

"""``evaluations/v2``: all answers of a held-out evaluation with their scores."""

from __future__ import annotations

import numpy as np
import pandera.pandas as pa

from rlcore.data_contracts.contracts.column_checks import filled, known_finish_reason, rule
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

    names_are_filled = filled("prompt_id", "task")
    mode_is_known = rule(lambda values: values.isin(MODES), "mode", error="must be 'greedy' or 'sampled'")
    counts_are_counts = rule(lambda values: values >= 0, "sample_index", "num_tokens", error="must be at least 0")
    value_is_finite = rule(lambda values: values.abs() < np.inf, "value", error="must be finite")
    finish_reason_is_known = known_finish_reason("finish_reason")
    correct_was_judged = rule(
        lambda frame: ~frame["correct"] | frame["value"].notna(), error="is called correct without a value"
    )


CONTRACT = Contract(
    name=NAME,
    model=Evaluations,
    id_column="prompt_id",
    answers=("completion",),
    keys=("prompt_id", "mode", "sample_index"),
)

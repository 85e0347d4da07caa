"""``difficulties/v1``: pass rates of a policy on prompts."""

from __future__ import annotations

import pandas as pd
import pandera.pandas as pa

from rlcore.data_contracts.contracts.column_checks import filled
from rlcore.data_contracts.contracts.contract import Contract

NAME = "difficulties/v1"


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
        name = NAME

    names_are_filled = filled("dataset", "prompt_id", "task")

    @pa.dataframe_check(error="pass_rate is not passed / answers, or lies outside its interval")
    @classmethod
    def figures_fit(cls, frame: pd.DataFrame) -> pd.Series:
        share = frame["passed"] / frame["answers"]
        return (share == frame["pass_rate"]) & (frame["low"] <= share) & (share <= frame["high"])


CONTRACT = Contract(name=NAME, model=Difficulties, id_column="prompt_id", keys=("dataset", "prompt_id"))

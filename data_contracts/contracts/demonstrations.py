"""``demonstrations/v1``: a question and the answer that supervised fine-tuning trains on."""

from __future__ import annotations

import pandas as pd
import pandera.pandas as pa

from rlcore.data_contracts.contracts import column_checks
from rlcore.data_contracts.contracts.contract import Contract


class Demonstrations(pa.DataFrameModel):
    """One row per demonstration.

    ``messages``: list of {role, content}, the last one the user's, or followed by tool calls: each a turn of the
    assistant and one of the role ``tool`` with its output. ``completion``: the assistant's answer without special
    tokens. ``reference``: the ground truth if there is one, else ``""``.
    """

    demonstration_id: str
    messages: object
    completion: str
    reference: str
    task: str
    split: str

    class Config:
        strict = True
        name = "demonstrations/v1"

    @pa.check("demonstration_id", "completion", "task", error="must not be blank")
    @classmethod
    def texts_are_filled(cls, texts: pd.Series) -> pd.Series:
        return column_checks.is_filled(texts)

    @pa.check("messages", error="must be filled turns of system, user and assistant, the user's or a tool's last")
    @classmethod
    def messages_are_a_question(cls, values: pd.Series) -> pd.Series:
        return column_checks.is_question_with_calls(values)

    @pa.check("reference", error="must be empty or something that a reader sees")
    @classmethod
    def reference_is_empty_or_filled(cls, texts: pd.Series) -> pd.Series:
        return column_checks.is_empty_or_filled(texts)

    @pa.check("split", error="must be 'train' or 'eval'")
    @classmethod
    def split_is_known(cls, values: pd.Series) -> pd.Series:
        return column_checks.is_split(values)


CONTRACT = Contract(
    name="demonstrations/v1", model=Demonstrations, id_column="demonstration_id", answers=("completion",)
)

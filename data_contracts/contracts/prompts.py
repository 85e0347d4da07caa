"""``prompts/v1``: prompts of the policy, with the reference answers that its answers are compared with."""

from __future__ import annotations

import pandas as pd
import pandera.pandas as pa

from rlcore.data_contracts.contracts import column_checks
from rlcore.data_contracts.contracts.contract import Contract


class Prompts(pa.DataFrameModel):
    """One row per prompt.

    ``messages``: list of {role, content}, the last one the user's. ``reference``: input of the verifier, ``""`` if the
    reward needs none. ``task``: the family of problems. ``split``: ``train`` or ``eval``.
    """

    prompt_id: str
    messages: object
    reference: str
    task: str
    split: str

    class Config:
        strict = True
        name = "prompts/v1"

    @pa.check("prompt_id", "task", error="must not be blank")
    @classmethod
    def names_are_filled(cls, texts: pd.Series) -> pd.Series:
        return column_checks.is_filled(texts)

    @pa.check("messages", error="must be filled turns of system, user and assistant, the user's last")
    @classmethod
    def messages_are_a_question(cls, values: pd.Series) -> pd.Series:
        return column_checks.is_question(values)

    @pa.check("reference", error="must be empty or something that a reader sees")
    @classmethod
    def reference_is_empty_or_filled(cls, texts: pd.Series) -> pd.Series:
        return column_checks.is_empty_or_filled(texts)

    @pa.check("split", error="must be 'train' or 'eval'")
    @classmethod
    def split_is_known(cls, values: pd.Series) -> pd.Series:
        return column_checks.is_split(values)


CARRIED = ("columns", "form")
"""``columns``: JSON of the source's other columns. ``form``: that of its question, ``text`` or ``messages``."""

CONTRACT = Contract(name="prompts/v1", model=Prompts, id_column="prompt_id", carried=CARRIED)

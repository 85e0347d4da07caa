"""``prompts/v1``: prompts of the policy, with the reference answers that its answers are compared with."""

from __future__ import annotations

import pandera.pandas as pa

from rlcore.data_contracts.contracts.column_checks import empty_or_filled, filled, known_split, question
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

    names_are_filled = filled("prompt_id", "task")
    messages_are_a_question = question("messages")
    reference_is_empty_or_filled = empty_or_filled("reference")
    split_is_known = known_split("split")


CARRIED = ("columns", "form")
"""``columns``: JSON of the source's other columns. ``form``: that of its question, ``text`` or ``messages``."""

CONTRACT = Contract(name="prompts/v1", model=Prompts, id_column="prompt_id", carried=CARRIED)

"""``demonstrations/v1``: a question and the answer that supervised fine-tuning trains on."""

from __future__ import annotations

import pandera.pandas as pa

from rlcore.data_contracts.contracts.column_checks import (
    each,
    empty_or_filled,
    filled,
    is_question_with_calls,
    known_split,
)
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

    texts_are_filled = filled("demonstration_id", "completion", "task")
    messages_are_a_question = each(
        is_question_with_calls,
        "messages",
        error="must be filled turns of system, user and assistant, the user's or a tool's last",
    )
    reference_is_empty_or_filled = empty_or_filled("reference")
    split_is_known = known_split("split")


CONTRACT = Contract(
    name="demonstrations/v1", model=Demonstrations, id_column="demonstration_id", answers=("completion",)
)

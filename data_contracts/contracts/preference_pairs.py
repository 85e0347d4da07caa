"""``preference_pairs/v2``: two answers to one question, the better one first."""

from __future__ import annotations

from typing import Any

import pandera.pandas as pa

from rlcore.data_contracts.contracts.column_checks import filled, known_split, question, rule
from rlcore.data_contracts.contracts.contract import Contract

MAX_MARGIN = 100.0  # rewards of pairs are some units apart; a larger number is another scale, or a mistake


class PreferencePairs(pa.DataFrameModel):
    """One row per pair.

    ``set_id``: pairs that were judged together. A single pair has its own ``pair_id`` there; the pairs of a ranking
    share one, so that a ranking counts as much as one pair. ``margin`` (0 to 100): required lead of the chosen answer,
    in units of reward. ``probability`` (in (1/2, 1]): that the chosen answer is better; 1/2 would be a tie. ``weight``
    (in (0, 1]): weight of the whole set. ``source``: origin of the pair.
    """

    pair_id: str
    set_id: str
    messages: object
    chosen: str
    rejected: str
    margin: float
    probability: float
    weight: float
    source: str
    split: str

    class Config:
        strict = True
        name = "preference_pairs/v2"

    texts_are_filled = filled("pair_id", "set_id", "chosen", "rejected", "source")
    messages_are_a_question = question("messages")
    margin_is_a_lead = rule(
        lambda values: (values >= 0.0) & (values <= MAX_MARGIN), "margin", error=f"must be between 0 and {MAX_MARGIN:g}"
    )
    label_is_more_likely_than_not = rule(
        lambda values: (values > 0.5) & (values <= 1.0),
        "probability",
        error="must be above 0.5 and at most 1: at 0.5 it is a tie, below the sides are swapped",
    )
    weight_is_a_share = rule(
        lambda values: (values > 0.0) & (values <= 1.0), "weight", error="must be above 0 and at most 1"
    )
    split_is_known = known_split("split")
    sides_differ = rule(lambda frame: frame["chosen"] != frame["rejected"], error="chosen and rejected are the same")


CONTRACT = Contract(
    name="preference_pairs/v2", model=PreferencePairs, id_column="pair_id", answers=("chosen", "rejected")
)


def single(pair_id: str) -> dict[str, Any]:
    """Return the columns of a single pair without label noise and without a margin."""
    return {"pair_id": pair_id, "set_id": pair_id, "margin": 0.0, "probability": 1.0, "weight": 1.0}

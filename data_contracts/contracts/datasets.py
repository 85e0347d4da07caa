"""Contracts of datasets: ``prompts/v1``, ``demonstrations/v1``, ``preference_pairs/v2`` and ``ranked_sets/v1``."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import pandera.pandas as pa

from rlcore.data_contracts.adapters.fields import Messages
from rlcore.data_contracts.contracts.column_checks import (
    each,
    empty_or_filled,
    filled,
    is_question_with_calls,
    known_split,
    question,
    rule,
)
from rlcore.data_contracts.contracts.contract import Contract
from rlcore.data_contracts.errors import LeftOutError, RowError

MAX_MARGIN = 100.0  # rewards of pairs are some units apart; a larger number is another scale, or a mistake
MAX_COMPLETIONS = 64  # 2,016 pairs of a line; the number of pairs is quadratic


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


class Demonstrations(pa.DataFrameModel):
    """One row per demonstration.

    ``messages``: as of prompts, or followed by tool calls: each a turn of the assistant and one of the role ``tool``
    with its output. ``completion``: the assistant's answer without special tokens. ``reference``: the ground truth if
    there is one, else ``""``.
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


class PreferencePairs(pa.DataFrameModel):
    """One row per pair of answers, the better one first.

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


CARRIED = ("columns", "form")
"""``columns``: JSON of the source's other columns. ``form``: that of its question, ``text`` or ``messages``."""

PROMPTS = Contract(name="prompts/v1", model=Prompts, id_column="prompt_id", carried=CARRIED)
DEMONSTRATIONS = Contract(
    name="demonstrations/v1", model=Demonstrations, id_column="demonstration_id", answers=("completion",)
)
PREFERENCE_PAIRS = Contract(
    name="preference_pairs/v2", model=PreferencePairs, id_column="pair_id", answers=("chosen", "rejected")
)
# The adapter checks these rows, and the gate the pairs that they become.
RANKED_SETS = Contract(name="ranked_sets/v1", model=PreferencePairs, id_column="set_id")


def single(pair_id: str) -> dict[str, Any]:
    """Return the columns of a single pair without label noise and without a margin."""
    return {"pair_id": pair_id, "set_id": pair_id, "margin": 0.0, "probability": 1.0, "weight": 1.0}


def expand(
    set_id: str,
    messages: Messages,
    completions: Sequence[str],
    ranks: Sequence[float],
    *,
    source: str,
    gap: float = 0.0,
) -> list[dict[str, Any]]:
    """Return the pairs of a ranking, as rows of ``preference_pairs/v2`` without ``split``.

    K answers without ties give K (K - 1) / 2 pairs, which share ``set_id`` and so count once together. A tie prefers
    neither side and gives no pair; ranks that differ by at most ``gap`` are ties.
    Raises:
        RowError: the numbers of ranks and completions differ, or exceed 64.
        LeftOutError: all are tied.
    """
    if len(completions) > MAX_COMPLETIONS:
        what = f"{len(completions)} completions are more than {MAX_COMPLETIONS}: divide the ranking into several sets"
        raise RowError("completions", what, completions[0])
    if len(completions) != len(ranks):
        raise RowError("ranks", f"{len(ranks)} ranks for {len(completions)} completions", list(ranks))
    order = sorted(range(len(ranks)), key=lambda place: ranks[place])
    pairs = [(better, worse) for better, worse in combinations(order, 2) if ranks[worse] - ranks[better] > gap]
    if not pairs:
        raise LeftOutError("ranks", "all completions are tied, so no pair follows", list(ranks))
    return [
        {
            **single(f"{set_id}-{better}-{worse}"),
            "set_id": set_id,
            "messages": messages,
            "chosen": completions[better],
            "rejected": completions[worse],
            "source": source,
        }
        for better, worse in pairs
    ]

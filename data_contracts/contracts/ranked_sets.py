"""``ranked_sets/v1``: several answers to one question in order of preference, and their pairs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import pandera.pandas as pa

from rlcore.data_contracts.adapters.fields import Messages
from rlcore.data_contracts.contracts.column_checks import (
    each,
    filled,
    is_list_of_counts,
    is_list_of_texts,
    known_split,
    question,
    rule,
)
from rlcore.data_contracts.contracts.contract import Contract
from rlcore.data_contracts.errors import LeftOutError, RowError

MAX_COMPLETIONS = 64  # 2,016 pairs of a line; the number of pairs is quadratic


class RankedSets(pa.DataFrameModel):
    """One row per question. ``ranks``: one integer per completion, 0 the best; equal ranks are ties."""

    set_id: str
    messages: object
    completions: object
    ranks: object
    split: str

    class Config:
        strict = True
        name = "ranked_sets/v1"

    names_are_filled = filled("set_id")
    messages_are_a_question = question("messages")
    completions_are_texts = each(is_list_of_texts, "completions", error="must be two or more texts that are not blank")
    ranks_are_counts = each(is_list_of_counts, "ranks", error="must be integers from 0")
    split_is_known = known_split("split")
    ranks_match_completions = rule(
        lambda frame: frame["completions"].map(_length) == frame["ranks"].map(_length),
        error="needs one rank for each completion",
    )


CONTRACT = Contract(name="ranked_sets/v1", model=RankedSets, id_column="set_id")


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
            "pair_id": f"{set_id}-{better}-{worse}",
            "set_id": set_id,
            "messages": messages,
            "chosen": completions[better],
            "rejected": completions[worse],
            "margin": 0.0,
            "probability": 1.0,
            "weight": 1.0,
            "source": source,
        }
        for better, worse in pairs
    ]


def _length(value: object) -> int:
    return len(value) if isinstance(value, list) else -1

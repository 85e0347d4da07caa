"""A reward of a user's own, as scorers on a cluster import it."""

from __future__ import annotations

from collections.abc import Sequence

from rlcore.types import Rollout


def even(rollouts: Sequence[Rollout]) -> list[float]:
    """The share of even token ids: it differs within a group, whatever a model writes."""
    return [sum(token % 2 == 0 for token in each.completion_ids) / len(each.completion_ids) for each in rollouts]

"""Graders: score rollouts. The names are those of :mod:`rlcore.rewards.table`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlcore.rewards.table import REWARDS, RewardResources, build_rewards

__all__ = ["REWARDS", "RewardResources", "build_rewards"]


def __getattr__(name: str) -> Any:
    """Load the table on first use: grader processes import this package and must start without torch."""
    if name in __all__:
        return getattr(importlib.import_module("rlcore.rewards.table"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

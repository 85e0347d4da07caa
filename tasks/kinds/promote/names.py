"""Names of the stages that a promotion adds, and of its model."""

from __future__ import annotations

from rlcore.tasks.presets.promotion import PromotionConfig

CHAMPION_STAGE = "champion"
WINS = "champion_win_rate"
"""The stage of the challenger's win rate over the champion, where that decides."""
CHALLENGER_ASKED, CHAMPION_ASKED = "asked_challenger_", "asked_champion_"
"""Prefixes of the stages of both sides' benchmarks."""


def model_name(preset: str, settings: PromotionConfig) -> str:
    """Return the registered model that the challenger is a version of."""
    return f"{preset}-{settings.challenger}"

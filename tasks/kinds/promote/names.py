"""Names of the stages that a promotion adds."""

from __future__ import annotations

CHAMPION_STAGE = "champion"
WINS = "champion_win_rate"
"""The stage of the challenger's win rate over the champion, where that decides."""
CHALLENGER_ASKED, CHAMPION_ASKED = "asked_challenger_", "asked_champion_"
"""Prefixes of the stages of both sides' benchmarks."""

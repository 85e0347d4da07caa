"""Confidence levels, intervals and checks with intervals as text and as metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rlcore.tasks.store.markdown import plain

if TYPE_CHECKING:
    from rlcore.evaluation.promotion import Check, PromotionDecision


def format_level(confidence: float) -> str:
    """Format a level: ``format_level(0.9)`` is ``90 %``, ``format_level(0.9917)`` is ``99.17 %``."""
    return f"{100 * confidence:.4g} %"


def format_interval(low: float, high: float, confidence: float) -> str:
    """Format an interval for a log line: ``ci95=[0.991,1.000]``."""
    return f"ci{100 * confidence:.4g}=[{low:.3f},{high:.3f}]"


def other_levels(levels: Mapping[str, float], confidence: float) -> str:
    """Name the stages whose cached intervals have another level than the others; empty if there are none."""
    found = [f"{name} ({format_level(level)})" for name, level in levels.items() if level != confidence]
    return f"Cached with intervals of another level: {', '.join(found)}." if found else ""


def check_table(decision: PromotionDecision) -> str:
    """Return a row per check. The interval has the confidence of the look."""
    interval = f"{format_level(1 - 2 * decision.alpha)} interval"
    lines = [f"| check | estimate | {interval} | limit | p | passed |", "|---|---|---|---|---|---|"]
    return "\n".join(lines + [_row(check) for check in decision.checks])


def _row(check: Check) -> str:
    p_value = "–" if check.p_value is None else f"{check.p_value:.2g}"
    interval = f"[{check.low:.3f}, {check.high:.3f}]" if check.low < check.high else "–"
    passed = "yes" if check.passed else "**no**"
    return f"| {plain(check.name)} | {check.estimate:.3f} | {interval} | {check.limit:.3f} | {p_value} | {passed} |"

"""Confidence levels and intervals as text and as metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlcore.evaluation.intervals import Interval


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


def with_bounds(name: str, interval: Interval) -> dict[str, float]:
    """Return an interval as three metrics: ``name``, ``name_low`` and ``name_high``."""
    return {name: interval.mean, f"{name}_low": interval.low, f"{name}_high": interval.high}

"""Confidence levels and intervals as text."""

from __future__ import annotations

from collections.abc import Mapping


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

"""Confidence levels and intervals as text."""

from __future__ import annotations


def format_level(confidence: float) -> str:
    """Format a level: ``format_level(0.9)`` is ``90 %``, ``format_level(0.9917)`` is ``99.17 %``."""
    return f"{100 * confidence:.4g} %"


def format_interval(low: float, high: float, confidence: float) -> str:
    """Format an interval for a log line: ``ci95=[0.991,1.000]``."""
    return f"ci{100 * confidence:.4g}=[{low:.3f},{high:.3f}]"

"""The level of an interval as text."""

from __future__ import annotations


def format_level(confidence: float) -> str:
    """A level as people write it: ``format_level(0.9)`` is ``90 %``, ``format_level(0.9917)`` is ``99.17 %``."""
    return f"{100 * confidence:.4g} %"

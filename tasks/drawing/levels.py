"""How pages write the level of an interval."""

from __future__ import annotations


def level(confidence: float) -> str:
    """A level as people write it: ``level(0.9)`` is ``90 %``, ``level(0.9917)`` is ``99.17 %``."""
    return f"{100 * confidence:.4g} %"

"""What the glossary says of a metric."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """One metric. ``<…>`` in ``name`` stands for any text without a slash.

    ``healthy`` is the range or the course that a sound run shows, ``fix`` what to try when it does not.
    """

    name: str
    formula: str
    unit: str
    healthy: str
    meaning: str
    fix: str

"""Result of a stage, from which its page is rendered."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Result:
    """Files of a stage in ``data``, and those of its inputs, by the stage's name.

    ``confidence``: the level of all intervals in these files.
    """

    preset: str
    stage: str
    confidence: float
    data: Path
    inputs: Mapping[str, Path]


Draw = Callable[[Result, Path], str]
"""Writes pages and plots into a folder; gives the Markdown for the flow run's page, or an empty text."""

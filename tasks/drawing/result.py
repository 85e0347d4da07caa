"""Result of a stage, from which its page is rendered."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Result:
    """Files of a stage in ``data``, and those of its inputs, by the stage's name.

    ``confidence``: the level of all intervals in ``data``; ``levels``: that of each input that measured some.
    """

    preset: str
    stage: str
    confidence: float
    data: Path
    inputs: Mapping[str, Path]
    levels: Mapping[str, float] = field(default_factory=dict)


Draw = Callable[[Result, Path], str]
"""Writes pages and plots into a folder; gives the Markdown for the flow run's page, or an empty text."""

Folders = Mapping[str, Path]
_FILES = {  # by which a stage of a kind is recognized
    "rl": "health.json",
    "reward_model": "reliability.json",
    "rejection": "rejection.json",
    "win_rate": "win_rate.json",
    "benchmark": "benchmark.json",
}


def of_kind(kind: str, folders: Folders) -> dict[str, Path]:
    """Return the stages of a kind among artifacts, in their order."""
    return {name: folder for name, folder in folders.items() if (folder / _FILES[kind]).is_file()}

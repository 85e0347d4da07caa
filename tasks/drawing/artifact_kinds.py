"""Kinds of a run's artifacts, recognized by their files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

Folders = Mapping[str, Path]


def rl_runs(folders: Folders) -> dict[str, Path]:
    """Return the stages of online RL, in their order."""
    return _with("health.json", folders)


def reward_models(folders: Folders) -> dict[str, Path]:
    """Return the stages that trained a reward model."""
    return _with("reliability.json", folders)


def rejections(folders: Folders) -> dict[str, Path]:
    """Return the stages of rejection sampling."""
    return _with("rejection.json", folders)


def win_rates(folders: Folders) -> dict[str, Path]:
    """Return the stages that compared two checkpoints by a judge."""
    return _with("win_rate.json", folders)


def benchmarks(folders: Folders) -> dict[str, Path]:
    """Return the stages that ran a checkpoint on tasks of the evaluation harness."""
    return _with("benchmark.json", folders)


def _with(file: str, folders: Folders) -> dict[str, Path]:
    return {name: folder for name, folder in folders.items() if (folder / file).is_file()}

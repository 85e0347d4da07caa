"""Checks of an RL stage before a run."""

from __future__ import annotations

from collections.abc import Iterator

from rlcore.checks.settings import algorithm_errors
from rlcore.tasks.kinds.rl.settings import RlStage


def errors(key: str, stage: RlStage) -> Iterator[str]:
    """Yield errors of the algorithm of the stage with the key ``stages.NAME``."""
    yield from (f"{key}.{error}" for error in algorithm_errors(stage.settings))

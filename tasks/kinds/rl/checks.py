"""Checks of an RL stage before a run."""

from __future__ import annotations

from collections.abc import Iterator

from rlcore.tasks.kinds.rl.settings import RlStage
from rlcore.tasks.steps.algorithm_facts import algorithm_facts


def errors(key: str, stage: RlStage) -> Iterator[str]:
    """Yield errors of the algorithm of the stage with the key ``stages.NAME``."""
    yield from (f"{key}.{error}" for error in algorithm_facts(stage.settings).errors)

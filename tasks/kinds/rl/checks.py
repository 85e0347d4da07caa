"""Checks of an RL stage before a run."""

from __future__ import annotations

from collections.abc import Iterator

from rlcore.tasks.kinds.rl.settings import RlStage
from rlcore.tasks.steps.algorithm_facts import algorithm_facts


def errors(key: str, stage: RlStage) -> Iterator[str]:
    """Yield errors of the algorithm and the agent of the stage with the key ``stages.NAME``."""
    facts, agent = algorithm_facts(stage.settings), stage.settings.sampling.agent
    yield from (f"{key}.{error}" for error in facts.errors)
    if agent and agent.branches == "train" and facts.uses_critic:
        yield (
            f"{key}.sampling.agent.branches = 'train': {stage.settings.algorithm} has a critic, whose values of an "
            "episode with several samples are not defined; take 'main', or an algorithm without a critic"
        )

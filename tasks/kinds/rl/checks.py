"""Checks of an RL stage before a run."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from rlcore.algorithms.advantages import AdvantageInputs
from rlcore.algorithms.resolve import resolve_algorithm
from rlcore.config import RlConfig
from rlcore.tasks.kinds.rl.settings import RlStage
from rlcore.tasks.presets.error_collection import collect_error


def errors(key: str, stage: RlStage) -> Iterator[str]:
    """Yield errors of the algorithm of the stage with the key ``stages.NAME``."""
    rl = stage.settings
    yield from collect_error(key, lambda: resolve_algorithm(rl), within=True) or _signal(key, rl)


def _signal(path: str, rl: RlConfig) -> Iterator[str]:
    """Check that a group of one has a signal, by computing its advantages."""
    if rl.group_size == 1:
        rewards, zeros = torch.tensor([0.0, 1.0], dtype=torch.float64), torch.zeros(2, 1)
        alone = AdvantageInputs(
            rewards=rewards,
            group=torch.tensor([0, 1]),
            token_rewards=rewards[:, None],
            values=zeros,
            mask=torch.ones(2, 1, dtype=torch.bool),
            next_values=zeros[:, 0],
        )
        if not resolve_algorithm(rl).advantage(alone).any():
            name = rl.algorithm
            yield f"{path}.group_size = 1: {name} compares answers to one prompt, so one carries no signal; take 8"

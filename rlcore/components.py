"""Components of an RL run, all of them complete before the first iteration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from rlcore.config import HealthConfig, RlConfig
from rlcore.rewards.mix import WeightedReward
from rlcore.sampling.base import Sampler
from rlcore.text.tokenization import ChatTokenizer
from rlcore.training.learner_protocol import LearnerProtocol
from rlcore.types import Prompt


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOut:
    """Problems that evaluate a run every ``eval_every`` iterations, and are never trained on.

    ``verifier``: independent of the training reward. ``correct_from``: lowest score of a correct answer, by dataset; by
    default 0.99.
    """

    prompts: Sequence[Prompt]
    verifier: WeightedReward
    confidence: float = 0.95
    correct_from: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Components:
    """All fixed objects of a run.

    Attributes:
        engine: Receives the weights.
        sampler: Gives the rollouts: the engine itself, or episodes with tools on it.
        engine_dtype: Compute precision of the engine.
        folder: Folder of the checkpoints.
        identity: Inputs that checkpoints must match.
        mixture_weights: Weight above 0 of each dataset; empty with a single one.
    """

    seed: int
    learner: LearnerProtocol
    engine: Sampler
    sampler: Sampler
    engine_dtype: torch.dtype
    tokenizer: ChatTokenizer
    reward: WeightedReward
    prompts: Sequence[Prompt]
    folder: Path
    identity: Mapping[str, str]
    held_out: HeldOut | None = None
    health: HealthConfig = field(default_factory=HealthConfig)
    mixture_weights: Mapping[str, float] = field(default_factory=dict)

    @property
    def config(self) -> RlConfig:
        return self.learner.config

    @property
    def coarser_dtype(self) -> torch.dtype:
        """The less precise of the engine's and the learner's compute precision, which limits their agreement."""
        both = (self.engine_dtype, self.learner.facts.compute_dtype)
        return max(both, key=lambda dtype: torch.finfo(dtype).eps)

"""What an RL run is made of: every part finished before the first iteration, and none of them replaced after it."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import PreTrainedModel

from rlcore.config import HealthConfig, RlConfig
from rlcore.models.lora import AdaptedModel
from rlcore.rewards.mix import MixedReward
from rlcore.sampling.base import Sampler
from rlcore.seeding import shuffled
from rlcore.tokenization import ChatTokenizer
from rlcore.training.learner import Learner
from rlcore.types import Prompt


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOut:
    """Problems that a run is evaluated on every ``eval_every`` iterations, and never trained on.

    ``verifier`` decides right or wrong, whatever the training reward mixes in. ``confidence``: of the interval.
    """

    prompts: Sequence[Prompt]
    verifier: MixedReward
    confidence: float = 0.95


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Parts:
    """Everything that an iteration works with.

    ``learner`` holds the policy, the critic and the configuration. ``reference``: the frozen start that a KL penalty
    is measured to; None where there is no penalty. ``engine`` takes the weights; ``sampler`` is what rollouts are asked
    of: the engine itself, or one that plays episodes with tools on it. ``engine_dtype``: what the engine computes in.

    ``folder`` is where checkpoints are written, and where a run that was killed goes on from; ``identity`` is what a
    checkpoint there must have been made with. ``reward_models``: the models inside of ``reward``, to measure memory.
    """

    seed: int
    learner: Learner
    reference: PreTrainedModel | AdaptedModel | None
    engine: Sampler
    sampler: Sampler
    engine_dtype: torch.dtype
    tokenizer: ChatTokenizer
    reward: MixedReward
    prompts: Sequence[Prompt]
    folder: Path
    identity: Mapping[str, str]
    held_out: HeldOut | None = None
    health: HealthConfig = field(default_factory=HealthConfig)
    reward_models: tuple[torch.nn.Module, ...] = ()

    @property
    def config(self) -> RlConfig:
        """The run's configuration, which the learner was made with."""
        return self.learner.config

    def prompts_of(self, iteration: int) -> list[Prompt]:
        """The prompts of one iteration (from 1): consecutive pieces of freshly shuffled epochs."""
        count = self.config.prompts_per_iteration
        return window(self.prompts, (iteration - 1) * count, count, seed=self.seed)


def window(prompts: Sequence[Prompt], start: int, count: int, *, seed: int) -> list[Prompt]:
    """``count`` prompts from place ``start`` of an endless row of epochs, each in an order of its own."""
    places = (divmod(place, len(prompts)) for place in range(start, start + count))
    return [prompts[_order(len(prompts), seed, epoch)[offset]] for epoch, offset in places]


@functools.lru_cache(maxsize=2)
def _order(count: int, seed: int, epoch: int) -> list[int]:
    return shuffled(count, seed, "prompts", epoch)

"""Settings of rejection sampling: which of a policy's own answers become demonstrations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rlcore.config.bounds import Fraction, NonNegativeInt, PositiveInt
from rlcore.config.rl import RewardTerm, SamplingConfig
from rlcore.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class RejectionConfig:
    """Sample ``num_samples`` answers to each training prompt, score them with ``rewards``, keep the good ones.

    ``choose``: ``verified`` keeps scores of ``threshold`` and more (correct answers, unless it is set), ``best`` the
    highest scores whatever they are.
    ``prefer``: which of equally good answers to a prompt come first. ``max_similarity``: an answer that shares more
    than this part of its words (Jaccard index of its runs of three words) with a kept one of its prompt is dropped.
    """

    num_samples: PositiveInt
    rewards: tuple[RewardTerm, ...]
    sampling: SamplingConfig
    choose: Literal["verified", "best"] = "verified"
    threshold: float = 0.99  # what is correct; rlcore.types, which says so, brings torch
    prefer: Literal["first", "shortest"] = "first"
    keep_per_prompt: PositiveInt = 1
    keep_per_task: NonNegativeInt = 0  # 0: no limit; otherwise tasks that are easy cannot crowd out the others
    max_similarity: Fraction = 1.0  # 1: only answers that are equal up to white space are duplicates
    tokens_per_microbatch: PositiveInt = 8192  # of a reward model that scores the answers
    num_prompts: NonNegativeInt = 0  # 0: all training prompts
    num_eval: PositiveInt = 32  # demonstrations held out for the loss curve of the SFT that follows

    def __post_init__(self) -> None:
        if self.sampling.staleness:
            raise ConfigError("sampling.staleness is of RL alone: rejection sampling has no updates to run ahead of")
        if self.sampling.max_replacements:
            raise ConfigError("sampling.max_replacements is of RL alone: rejection sampling has no groups to replace")

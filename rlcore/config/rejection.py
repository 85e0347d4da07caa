"""Settings of stages that sample many completions per training prompt, such as rejection sampling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rlcore.config.bounds import Fraction, NonNegativeInt, PositiveInt
from rlcore.config.rl import RewardTerm, SamplingConfig
from rlcore.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class AnswersConfig:
    """Sample ``num_samples`` completions of each training prompt, and score them with ``rewards``."""

    num_samples: PositiveInt
    rewards: tuple[RewardTerm, ...]
    sampling: SamplingConfig
    threshold: float = 0.99  # lowest score of a correct completion; as in rlcore.types
    tokens_per_microbatch: PositiveInt = 8192  # of a reward model that scores the completions
    num_prompts: NonNegativeInt = 0  # 0: all training prompts

    def __post_init__(self) -> None:
        if self.sampling.staleness:
            raise ConfigError('sampling.staleness is only valid for kind = "rl"')
        if self.sampling.dynamic_sampling_rounds:
            raise ConfigError('sampling.dynamic_sampling_rounds is only valid for kind = "rl"')
        if self.sampling.zero_signal_keep_prob < 1.0:
            raise ConfigError('sampling.zero_signal_keep_prob is only valid for kind = "rl"')


@dataclass(frozen=True, kw_only=True)
class RejectionConfig(AnswersConfig):
    """Sample ``num_samples`` completions of each training prompt, score them with ``rewards``, keep the good ones.

    ``choose``: ``verified`` keeps completions with a score of at least ``threshold``; ``best`` keeps those with the
    highest scores. ``prefer``: order of equally good completions of a prompt. ``max_similarity``: drop a completion
    whose Jaccard index of three-word sequences with a kept one of its prompt is larger.
    """

    choose: Literal["verified", "best"] = "verified"
    prefer: Literal["first", "shortest"] = "first"
    keep_per_prompt: PositiveInt = 1
    keep_per_task: NonNegativeInt = 0  # limits easy tasks, so that other tasks keep their weight; 0: no limit
    max_similarity: Fraction = 1.0  # 1: drop only completions that are equal up to white space
    num_eval: PositiveInt = 32  # demonstrations held out for the loss curve of the SFT that follows

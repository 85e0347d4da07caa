"""Settings of stages that sample completions and score, compare or test them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from rlcore.config.rl import DEFAULT_TIMEOUT_MINUTES, RewardTerm, as_term
from rlcore.config.sampling import SamplingConfig
from rlcore.errors import ConfigError
from rlcore.strict_config import Duration, Fraction, NonNegativeInt, PositiveInt, Scalar


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
        self.sampling.require_no_rl()


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


@dataclass(frozen=True, kw_only=True)
class JudgeConfig:
    """Judge of two completions.

    ``kind``: ``judge``, a language model behind an endpoint; ``reward_model``, trained by the stage ``stage``; or a
    custom function ``module:function``. ``files``: data files that such a function reads.
    """

    kind: str
    stage: str = ""
    options: Mapping[str, Scalar] = field(default_factory=dict)
    files: tuple[str, ...] = ()
    timeout_minutes: Duration = DEFAULT_TIMEOUT_MINUTES  # per call of a custom function, which compares all pairs

    def __post_init__(self) -> None:
        if self.kind not in ("judge", "reward_model") and ":" not in self.kind:
            raise ConfigError(f"kind = {self.kind!r}: must be 'judge', 'reward_model' or module:function")
        if self.kind == "reward_model" and self.options:
            raise ConfigError("options is not valid for kind = 'reward_model': the higher reward wins")
        self.term  # noqa: B018 - raises the errors of a reward term

    @property
    def term(self) -> RewardTerm:
        """Reward term with the same settings."""
        return as_term(self)


@dataclass(frozen=True, kw_only=True)
class JudgeBounds:
    """Requirements for a judge on held-out human pairs, before its win rate is trusted.

    ``min_agreement``: for the lower end of the interval of its agreement. ``max_position_bias``: fraction of results
    that depend on the order. ``max_length_bias``: how much more often than humans it prefers the longer completion.
    ``max_dependence``: of its agreement with a reward model of the policy, beyond that of independent errors.
    """

    min_agreement: Fraction = 0.55
    max_position_bias: Fraction = 0.5
    max_length_bias: Fraction = 0.15
    max_dependence: Fraction = 0.6


@dataclass(frozen=True, kw_only=True)
class WinRateConfig:
    """``judge`` compares the completions of two checkpoints on held-out prompts, each pair in both orders.

    ``greedy``: greedy decoding; else samples at ``sampling.temperature``. ``num_prompts``: per dataset; 0: all.
    ``num_human_pairs``: maximum number of human pairs in the judge audit. ``max_unjudged``: maximum fraction of pairs
    without a result; more is an error.
    """

    judge: JudgeConfig
    sampling: SamplingConfig
    greedy: bool = True
    num_prompts: NonNegativeInt = 0
    num_human_pairs: PositiveInt = 500
    bounds: JudgeBounds = field(default_factory=JudgeBounds)
    max_unjudged: Fraction = 0.1
    tokens_per_microbatch: PositiveInt = 8192  # of a reward model as judge

    def __post_init__(self) -> None:
        self.sampling.require_no_rl()


@dataclass(frozen=True, kw_only=True)
class BenchmarkConfig:
    """Tasks, each a file ``<task>.yaml`` in ``folder``, with its data as JSONL files in the same folder.

    ``chat``: use the model's chat template; if false, send prompts as plain text. ``max_new_tokens``: length limit of
    tasks that set none.
    """

    folder: str
    tasks: tuple[str, ...]
    chat: bool = True
    limit: NonNegativeInt = 0  # documents per task; 0: all
    max_new_tokens: PositiveInt = 256
    max_concurrent: PositiveInt = 64
    tokens_per_microbatch: PositiveInt = 8192

    def __post_init__(self) -> None:
        if not self.tasks:
            raise ConfigError("tasks is empty", fix="list the files of the folder, without .yaml")
        for name in self.tasks:
            if not name.replace("_", "").replace("-", "").isalnum():
                raise ConfigError(f"tasks: {name!r} is not the name of a file without .yaml")

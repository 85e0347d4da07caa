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

    num_samples: PositiveInt  # completions per prompt
    rewards: tuple[RewardTerm, ...]
    sampling: SamplingConfig
    threshold: float = 0.99  # lowest score of a correct completion; as in rlcore.types
    tokens_per_microbatch: PositiveInt = 8192  # of a reward model that scores the completions
    num_prompts: NonNegativeInt = 0  # 0: all training prompts

    def __post_init__(self) -> None:
        self.sampling.require_no_rl()


@dataclass(frozen=True, kw_only=True)
class RejectionConfig(AnswersConfig):
    """Sample ``num_samples`` completions of each training prompt, score them with ``rewards``, keep the good ones."""

    # `verified`: completions with a score of at least `threshold`; `best`: those with the highest scores
    choose: Literal["verified", "best"] = "verified"
    prefer: Literal["first", "shortest"] = "first"  # order of equally good completions of a prompt
    keep_per_prompt: PositiveInt = 1  # most completions kept of a prompt
    keep_per_task: NonNegativeInt = 0  # limits easy tasks, so that other tasks keep their weight; 0: no limit
    num_eval: PositiveInt = 32  # demonstrations held out for the loss curve of the SFT that follows


@dataclass(frozen=True, kw_only=True)
class JudgeConfig:
    """Judge of two completions."""

    # `judge`: a language model behind an endpoint; `reward_model`: of the stage `stage`; or `module:function`
    kind: str
    stage: str = ""  # the stage that trains the reward model
    options: Mapping[str, Scalar] = field(default_factory=dict)  # options of the judge, such as endpoint and model
    files: tuple[str, ...] = ()  # data files that a custom function reads
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
    """Requirements for a judge on held-out human pairs, before its win rate is trusted."""

    min_agreement: Fraction = 0.55  # least lower end of the interval of its agreement with people
    max_position_bias: Fraction = 0.5  # largest fraction of results that depend on the order
    max_length_bias: Fraction = 0.15  # how much more often than people it may prefer the longer completion
    # largest agreement with a reward model of the policy, beyond that of independent errors
    max_dependence: Fraction = 0.6


@dataclass(frozen=True, kw_only=True)
class WinRateConfig:
    """``judge`` compares the completions of two checkpoints on held-out prompts, each pair in both orders."""

    judge: JudgeConfig
    sampling: SamplingConfig
    greedy: bool = True  # greedy decoding; false: samples at `sampling.temperature`
    num_prompts: NonNegativeInt = 0  # per dataset; 0: all
    num_human_pairs: PositiveInt = 500  # most human pairs in the judge audit
    bounds: JudgeBounds = field(default_factory=JudgeBounds)
    max_unjudged: Fraction = 0.1  # largest fraction of pairs without a result; more is an error
    tokens_per_microbatch: PositiveInt = 8192  # of a reward model as judge

    def __post_init__(self) -> None:
        self.sampling.require_no_rl()


@dataclass(frozen=True, kw_only=True)
class BenchmarkConfig:
    """Tasks, each a file ``<task>.yaml`` in ``folder``, with its data as JSONL files in the same folder."""

    folder: str  # folder with the tasks
    tasks: tuple[str, ...]  # names of files in the folder, without `.yaml`
    chat: bool = True  # use the model's chat template; false: prompts as plain text
    limit: NonNegativeInt = 0  # documents per task; 0: all
    max_new_tokens: PositiveInt = 256  # length limit of tasks that set none
    max_concurrent: PositiveInt = 64  # sequences decoded at the same time
    tokens_per_microbatch: PositiveInt = 8192  # tokens of one forward pass, padding included

    def __post_init__(self) -> None:
        if not self.tasks:
            raise ConfigError("tasks is empty", fix="list the files of the folder, without .yaml")
        for name in self.tasks:
            if not name.replace("_", "").replace("-", "").isalnum():
                raise ConfigError(f"tasks: {name!r} is not the name of a file without .yaml")

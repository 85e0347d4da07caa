"""Settings of a win rate: a judge compares the completions of two checkpoints on the same held-out prompts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rlcore.config.bounds import Duration, Fraction, NonNegativeInt, PositiveInt, Scalar
from rlcore.config.rl import DEFAULT_TIMEOUT_MINUTES, RewardTerm, SamplingConfig
from rlcore.errors import ConfigError


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
        return RewardTerm(
            kind=self.kind,
            stage=self.stage,
            options=self.options,
            files=self.files,
            timeout_minutes=self.timeout_minutes,
        )


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
        if (
            self.sampling.staleness
            or self.sampling.dynamic_sampling_rounds
            or self.sampling.zero_signal_keep_prob < 1.0
        ):
            raise ConfigError(
                "sampling.staleness, sampling.dynamic_sampling_rounds and sampling.zero_signal_keep_prob are only "
                'valid for kind = "rl"'
            )

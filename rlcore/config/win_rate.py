"""Settings of a win rate: two checkpoints answer the same held-out prompts, and a judge compares the answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rlcore.config.bounds import Fraction, NonNegativeInt, PositiveFloat, PositiveInt, Scalar
from rlcore.config.rl import DEADLINE_MINUTES, RewardTerm, SamplingConfig
from rlcore.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class JudgeConfig:
    """Who says which of two answers is better.

    ``kind``: ``judge``, a language model behind an endpoint; ``reward_model``, the one that the stage ``stage``
    trains; or ``module:function``, a function of one's own. ``files``: the data files that such a function reads.
    """

    kind: str
    stage: str = ""
    options: Mapping[str, Scalar] = field(default_factory=dict)
    files: tuple[str, ...] = ()
    timeout_minutes: PositiveFloat = DEADLINE_MINUTES  # of one call of a function of one's own, with all its pairs

    def __post_init__(self) -> None:
        if self.kind not in ("judge", "reward_model") and ":" not in self.kind:
            raise ConfigError(f"kind = {self.kind!r}: must be 'judge', 'reward_model' or module:function")
        if self.kind == "reward_model" and self.options:
            raise ConfigError("a reward model that compares takes no options: the higher reward wins")
        self.term  # noqa: B018 - refuses what a reward term refuses

    @property
    def term(self) -> RewardTerm:
        """The judge as a reward term, which names the same things."""
        return RewardTerm(
            kind=self.kind,
            stage=self.stage,
            options=self.options,
            files=self.files,
            timeout_minutes=self.timeout_minutes,
        )


@dataclass(frozen=True, kw_only=True)
class JudgeBounds:
    """What a judge has to reach on held-out human pairs before its win rate is trusted.

    ``min_agreement``: the lower end of its agreement's interval. ``max_position_bias``: the share of its verdicts that
    depend on the order of the answers. ``max_length_bias``: how much more often than people it prefers the longer one.
    """

    min_agreement: Fraction = 0.55
    max_position_bias: Fraction = 0.5
    max_length_bias: Fraction = 0.15


@dataclass(frozen=True, kw_only=True)
class WinRateConfig:
    """``judge`` compares the answers of two checkpoints to held-out prompts, each pair in both orders.

    ``greedy``: the likeliest answers; else draws at ``sampling.temperature``. ``num_prompts``: of each data set, 0 for
    all. ``num_human_pairs``: on how many human pairs, at most, the judge is audited. ``max_unjudged``: the largest
    share of pairs without a verdict; more is an error.
    """

    judge: JudgeConfig
    sampling: SamplingConfig
    greedy: bool = True
    num_prompts: NonNegativeInt = 0
    num_human_pairs: PositiveInt = 500
    bounds: JudgeBounds = field(default_factory=JudgeBounds)
    max_unjudged: Fraction = 0.1
    tokens_per_microbatch: PositiveInt = 8192  # for a reward model that judges

    def __post_init__(self) -> None:
        if (
            self.sampling.staleness
            or self.sampling.dynamic_sampling_rounds
            or self.sampling.zero_signal_keep_prob < 1.0
        ):
            raise ConfigError(
                "only RL stages take sampling.staleness, sampling.dynamic_sampling_rounds and "
                "sampling.zero_signal_keep_prob"
            )

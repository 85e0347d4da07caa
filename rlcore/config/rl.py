"""Settings of online reinforcement learning."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Literal

from rlcore.config.sampling import SamplingConfig
from rlcore.config.training import LoraConfig, OptimConfig
from rlcore.errors import ConfigError
from rlcore.strict_config import (
    Duration,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Scalar,
)


@dataclass(frozen=True, kw_only=True)
class KlConfig:
    """KL to the reference policy. :mod:`rlcore.algorithms.kl` explains the gradients of the estimators."""

    coefficient: NonNegativeFloat = 0.0  # weight of the KL; 0: no reference policy; raise it if `kl/ref` grows too fast
    # `reward` subtracts k1 from each token's reward; `loss` adds `estimator` to the loss
    apply_to: Literal["reward", "loss"] = "loss"
    # estimator in the loss; `k2_plain` and `k3_plain` reproduce papers
    estimator: Literal["k1_ratio", "k2", "k3_ratio", "k2_plain", "k3_plain"] = "k3_ratio"
    # KL per completion in nats that an adaptive coefficient holds; 0: constant coefficient
    target: NonNegativeFloat = 0.0
    horizon: PositiveInt = 10_000  # completions over which the adaptive coefficient follows `target`; smaller: faster

    def __post_init__(self) -> None:
        if self.target > 0.0 and self.coefficient == 0.0:
            raise ConfigError("target > 0 needs a starting coefficient > 0")


@dataclass(frozen=True, kw_only=True)
class GaeConfig:
    """Variants of generalised advantage estimation; the defaults give the plain form with one lambda."""

    lam_value: Fraction | None = None  # lambda of the critic's returns; left out: `critic.lam` (VAPO, Yue et al. 2025)
    # above 0: the policy's lambda is `1 - 1 / (lam_alpha * length)` of each completion, not `critic.lam` (VAPO)
    lam_alpha: NonNegativeFloat = 0.0
    # truncated completions end with the critic's value of their last state, instead of 0
    bootstrap_truncated: bool = False


@dataclass(frozen=True, kw_only=True)
class CriticConfig:
    """The critic of PPO. Without ``optim`` it uses ``update.optim``."""

    init_from: str = "policy"  # `policy`, or the stage whose reward model initialises the critic
    # `separate`: own backbone; `shared`: head on the policy's backbone, trained in one step for `L_policy + coefficient
    # * L_value`; `lora`: LoRA of `update.lora`'s shape on the policy's frozen base
    architecture: Literal["separate", "shared", "lora"] = "separate"
    detach: bool = False  # with `shared`: stop the gradient of the head before the backbone
    coefficient: NonNegativeFloat = 0.5  # with `shared`: weight of the value loss
    learning_rate: PositiveFloat = 1e-5  # of the weights that the critic does not share with the policy
    clip_range: NonNegativeFloat = 0.2  # of the value per update; 0: no clipping
    huber_delta: NonNegativeFloat = 0.0  # larger errors count linearly (Huber loss); 0: squared error
    gamma: Fraction = 1.0  # discount per token; 1: a reward at the end counts in full for every token
    lam: Fraction = 0.95  # lambda of GAE; lower: less variance, more bias
    gae: GaeConfig = field(default_factory=GaeConfig)
    optim: OptimConfig | None = None
    warmup_iterations: NonNegativeInt = 0  # first iterations, which train only the critic

    def __post_init__(self) -> None:
        if self.architecture != "shared":
            return
        if self.init_from != "policy":
            raise ConfigError("architecture = 'shared' uses the policy's backbone: init_from must be 'policy'")
        if self.optim is not None:
            raise ConfigError("architecture = 'shared' uses the policy's optimizer: set update.optim, not critic.optim")


@dataclass(frozen=True, kw_only=True)
class RolloutCorrectionConfig:
    """Importance weights against the mismatch of the log-probabilities of engine and learner."""

    # `truncate` limits the weight to `high`; `mask` sets it to 0 outside [`low`, `high`]; `off`: no weights
    mode: Literal["truncate", "mask", "off"] = "truncate"
    # one weight per token, or one per completion (the product of its tokens)
    level: Literal["token", "sequence"] = "token"
    low: NonNegativeFloat = 0.5  # lowest weight that `mask` keeps
    high: PositiveFloat | None = None  # largest weight; left out: 2 for `truncate`, 5 for `mask`

    def __post_init__(self) -> None:
        if self.low > self.upper:
            raise ConfigError("low must not be above high")

    @property
    def upper(self) -> float:
        """``high``, or the default of the mode."""
        return self.high if self.high is not None else {"truncate": 2.0, "mask": 5.0, "off": math.inf}[self.mode]


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """Constants of the algorithm; left out: those of its row. A constant that the row does not use is an error."""

    # divisor of a group's centred rewards: std of the group or of the batch, or none
    scale: Literal["group", "group_sample", "batch", "batch_sample", "none"] | None = None
    # distance below 1 at which the ratio is clipped; for dppo_tv, of the probability difference
    clip_low: NonNegativeFloat | None = None
    # distance above 1 at which the ratio is clipped; larger: rare tokens may grow faster
    clip_high: NonNegativeFloat | None = None
    dual_clip: NonNegativeFloat | None = None  # largest ratio for negative advantages (usually 3); 0: no limit
    gate_positive: PositiveFloat | None = None  # of sapo: temperature of the soft gate for positive advantages
    gate_negative: PositiveFloat | None = None  # of sapo: temperature of the soft gate for negative advantages
    penalty_coefficient: PositiveFloat | None = None  # of ppo_penalty: starting coefficient of the KL
    penalty_target: PositiveFloat | None = None  # of ppo_penalty: target of the KL after an update, nats per token
    # weight of a token in the loss: equal over the step, per completion, summed, or over a constant length
    weighting: Literal["token_mean", "sequence_mean", "sequence_sum", "constant"] | None = None
    constant_length: PositiveInt | None = None  # for weighting = constant; left out: sampling.max_new_tokens

    def __post_init__(self) -> None:
        if self.dual_clip is not None and 0.0 < self.dual_clip <= 1.0:
            raise ConfigError("dual_clip must be above 1 (usually 3), or 0 for off")


DEFAULT_TIMEOUT_MINUTES = 60.0


@dataclass(frozen=True, kw_only=True)
class RewardTerm:
    """One weighted component of the reward."""

    kind: str  # a built-in reward, or `module:function`
    data: tuple[str, ...] = ()  # datasets whose rollouts are scored; empty: all
    stage: str = ""  # for kind `reward_model`: the stage that trains it
    weight: float = 1.0  # factor of the term in the total reward
    # a score below it makes the total reward `below_gate`, whatever the other terms are; left out: no gate
    gate: float | None = None
    below_gate: float = 0.0  # total reward of a rollout below the gate
    # options of the reward, or keyword arguments of the function
    options: Mapping[str, Scalar] = field(default_factory=dict)
    files: tuple[str, ...] = ()  # data files that a custom function reads; a change of one reruns the stage
    # interpreter for a custom function whose packages cannot be installed next to rlcore; empty: this one
    python: str = ""
    timeout_minutes: Duration = DEFAULT_TIMEOUT_MINUTES  # per call of a custom function, which scores all rollouts

    @property
    def module(self) -> str:
        """Module of a custom function, or "" for a reward of the table."""
        return self.kind.partition(":")[0] if ":" in self.kind else ""

    def __post_init__(self) -> None:
        if self.files and not self.module:
            raise ConfigError(f"files is only valid for a custom function (module:function), got kind {self.kind!r}")
        if self.python and not self.module:
            raise ConfigError(f"python is only valid for a custom function (module:function), got kind {self.kind!r}")
        if self.timeout_minutes != DEFAULT_TIMEOUT_MINUTES and not self.module:
            raise ConfigError(f"timeout_minutes is only valid for a custom function, got kind {self.kind!r}")
        if self.gate is None and self.below_gate != 0.0:
            raise ConfigError("below_gate needs a gate")
        if self.stage and self.kind != "reward_model":
            raise ConfigError(f"stage is only valid for kind reward_model, got kind {self.kind!r}")


def as_term(section: object) -> RewardTerm:
    """Return the reward term with the settings of a verifier or a judge."""
    names = {each.name for each in fields(RewardTerm)}
    return RewardTerm(**{name: value for name, value in vars(section).items() if name in names})


@dataclass(frozen=True, kw_only=True)
class UpdateConfig:
    """Optimizer steps of one iteration."""

    num_epochs: PositiveInt = 1  # passes over the rollouts of an iteration
    num_minibatches: PositiveInt = 1  # optimizer steps per epoch; more: faster learning from older samples
    # tokens of one forward pass, padding included; lower it if memory is short
    tokens_per_microbatch: PositiveInt = 8192
    entropy_coefficient: NonNegativeFloat = 0.0  # weight of the entropy bonus; raise it if `entropy` falls to 0
    # nats per token to the sampling policy; an epoch whose mean exceeds it is the update's last; 0: no limit
    early_stop_kl: NonNegativeFloat = 0.0
    # nats per token to the reference policy; an epoch whose mean exceeds it is the last; 0: no limit
    early_stop_ref_kl: NonNegativeFloat = 0.0
    # consecutive steps that may be skipped because of NaN or infinity (their batch is saved); one more ends the run, as
    # does any in the last iteration
    max_skipped_steps: NonNegativeInt = 2
    truncated_completions: Literal["score", "mask", "zero"] = "score"  # keep the reward, do not train, or reward 0
    optim: OptimConfig = field(default_factory=OptimConfig)
    rollout_correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)

    @property
    def needs_old_logprobs(self) -> bool:
        """True if an update has several steps. A single step uses its own detached log-probabilities."""
        return self.num_epochs * self.num_minibatches > 1


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpoint interval. A run also writes a checkpoint after its first and its last iteration.

    No result depends on the number of checkpoints.
    """

    every_minutes: Duration = 15.0  # minutes of work that a crash may lose
    every_iterations: NonNegativeInt = 0  # above 0: interval in iterations, instead of `every_minutes`


OBSERVERS = ("eval_every", "checkpoints")
"""Keys of :class:`RlConfig` that no weight depends on."""


@dataclass(frozen=True, kw_only=True)
class RlConfig:
    """One online-RL run."""

    algorithm: str  # a row of docs/algorithms.md, such as `grpo` or `ppo`
    # iterations: each samples, updates and syncs once; a larger number extends a finished run
    num_iterations: PositiveInt
    prompts_per_iteration: PositiveInt  # prompts of a batch, on any number of GPUs
    group_size: PositiveInt  # completions per prompt; larger: less noise in the baseline, more sampling
    learning_rate: PositiveFloat  # peak learning rate of the policy
    rewards: tuple[RewardTerm, ...] = ()  # empty: the KL to a teacher is the only reward
    sampling: SamplingConfig
    update: UpdateConfig = field(default_factory=UpdateConfig)
    kl: KlConfig = field(default_factory=KlConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    eval_every: NonNegativeInt = 0  # iterations between held-out evaluations; 0: none
    checkpoints: CheckpointConfig = field(default_factory=CheckpointConfig)

    @property
    def steps_per_iteration(self) -> int:
        """Largest number of optimizer steps of an iteration: a minibatch has at least one prompt."""
        return self.update.num_epochs * min(self.update.num_minibatches, self.prompts_per_iteration)

    @property
    def bound_to_length(self) -> str:
        """Reason why even early iterations depend on ``num_iterations``; empty if they do not."""
        critic = self.critic.optim or self.update.optim
        schedules = {"update.optim.schedule": self.update.optim.schedule, "critic.optim.schedule": critic.schedule}
        bound = [f"{name} = {value!r} ends with it" for name, value in schedules.items() if value != "constant"]
        if self.sampling.staleness:
            bound.append(f"sampling.staleness = {self.sampling.staleness} prefetches up to it")
        return next(iter(bound), "")

    def __post_init__(self) -> None:
        if self.sampling.dynamic_sampling_rounds > 0 and self.group_size == 1:
            raise ConfigError(
                "sampling.dynamic_sampling_rounds needs group_size > 1: a group of one never has a signal"
            )
        if self.sampling.zero_signal_keep_prob < 1.0 and self.group_size == 1:
            raise ConfigError(
                "sampling.zero_signal_keep_prob < 1 needs group_size > 1: a group of one never has a signal"
            )
        if self.sampling.staleness and self.update.rollout_correction.mode == "off":
            raise ConfigError(
                "sampling.staleness > 0 needs update.rollout_correction: rollouts are sampled with older weights"
            )
        if self.update.early_stop_ref_kl > 0.0 and self.kl.coefficient == 0.0:
            raise ConfigError("update.early_stop_ref_kl needs kl.coefficient > 0: else there is no reference policy")
        if self.critic.gae.bootstrap_truncated and self.update.truncated_completions != "score":
            raise ConfigError(
                "critic.gae.bootstrap_truncated values the end of truncated completions, but "
                f"update.truncated_completions = {self.update.truncated_completions!r} drops their reward: choose one"
            )
        if self.critic.architecture == "lora" and self.update.lora.rank == 0:
            raise ConfigError("critic.architecture = 'lora' needs update.lora.rank > 0, which freezes the base")

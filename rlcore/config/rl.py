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
    """KL to the reference policy. ``apply_to`` ``reward`` uses k1 per token; ``loss`` uses ``estimator``.

    ``target`` > 0 (nats per completion) enables the adaptive controller; ``horizon`` is in completions. The estimators
    ``k2_plain`` and ``k3_plain`` reproduce papers; :mod:`rlcore.algorithms.kl` explains their gradients.
    """

    coefficient: NonNegativeFloat = 0.0
    apply_to: Literal["reward", "loss"] = "loss"
    estimator: Literal["k1_ratio", "k2", "k3_ratio", "k2_plain", "k3_plain"] = "k3_ratio"
    target: NonNegativeFloat = 0.0
    horizon: PositiveInt = 10_000

    def __post_init__(self) -> None:
        if self.target > 0.0 and self.coefficient == 0.0:
            raise ConfigError("target > 0 needs a starting coefficient > 0")


@dataclass(frozen=True, kw_only=True)
class GaeConfig:
    """Variants of generalised advantage estimation; the defaults give the plain form with one lambda.

    ``lam_value``: lambda of the critic's returns; left out: the policy's. ``lam_alpha`` > 0: the policy's lambda is
    ``1 - 1 / (lam_alpha * length)`` of each completion, instead of ``critic.lam`` (both VAPO, Yue et al. 2025).
    ``bootstrap_truncated``: truncated completions end with the critic's value of their last state, instead of 0.
    """

    lam_value: Fraction | None = None
    lam_alpha: NonNegativeFloat = 0.0
    bootstrap_truncated: bool = False


@dataclass(frozen=True, kw_only=True)
class CriticConfig:
    """The critic of PPO. Without ``optim`` it uses ``update.optim``.

    ``init_from``: ``policy``, or the stage whose reward model initialises the critic.

    ``architecture``: ``separate``, an own backbone; ``shared``, a head on the policy's backbone, trained in one forward
    pass and one optimizer step for ``L_policy + coefficient * L_value`` (``detach`` stops the gradient of the head
    before the backbone); ``lora``, a LoRA of ``update.lora``'s shape on the policy's frozen base. ``learning_rate``: of
    the weights that the critic does not share with the policy.
    """

    init_from: str = "policy"
    architecture: Literal["separate", "shared", "lora"] = "separate"
    detach: bool = False
    coefficient: NonNegativeFloat = 0.5
    learning_rate: PositiveFloat = 1e-5
    clip_range: NonNegativeFloat = 0.2  # 0: no value clipping
    huber_delta: NonNegativeFloat = 0.0  # larger errors count linearly (Huber loss); 0: squared error
    gamma: Fraction = 1.0
    lam: Fraction = 0.95
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
    """Importance weights against the mismatch of the log-probabilities of engine and learner.

    ``truncate`` limits the weight to ``high``; ``mask`` sets it to 0 outside [``low``, ``high``]. ``high`` defaults to
    2 for ``truncate`` and to 5 for ``mask``.
    """

    mode: Literal["truncate", "mask", "off"] = "truncate"
    level: Literal["token", "sequence"] = "token"
    low: NonNegativeFloat = 0.5
    high: PositiveFloat | None = None

    def __post_init__(self) -> None:
        if self.low > self.upper:
            raise ConfigError("low must not be above high")

    @property
    def upper(self) -> float:
        """``high``, or the default of the mode."""
        return self.high if self.high is not None else {"truncate": 2.0, "mask": 5.0, "off": math.inf}[self.mode]


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """Constants of the algorithm; left out: those of its row. A constant that the row does not use is an error.

    ``scale``: divisor of a group's centred rewards: the std of the group or of the batch, or nothing. ``clip_low``,
    ``clip_high``: bounds of the ratio, or of the probability difference (dppo_tv). ``dual_clip``: bound of the ratio
    for negative advantages (usually 3), 0: off. ``gate_…``: of sapo. ``penalty_…``, of ppo_penalty: starting
    coefficient, and target of the KL after an update in nats per token. ``constant_length`` in tokens.
    """

    scale: Literal["group", "group_sample", "batch", "batch_sample", "none"] | None = None
    clip_low: NonNegativeFloat | None = None
    clip_high: NonNegativeFloat | None = None
    dual_clip: NonNegativeFloat | None = None
    gate_positive: PositiveFloat | None = None
    gate_negative: PositiveFloat | None = None
    penalty_coefficient: PositiveFloat | None = None
    penalty_target: PositiveFloat | None = None
    weighting: Literal["token_mean", "sequence_mean", "sequence_sum", "constant"] | None = None
    constant_length: PositiveInt | None = None  # for weighting = constant; left out: sampling.max_new_tokens

    def __post_init__(self) -> None:
        if self.dual_clip is not None and 0.0 < self.dual_clip <= 1.0:
            raise ConfigError("dual_clip must be above 1 (usually 3), or 0 for off")


DEFAULT_TIMEOUT_MINUTES = 60.0


@dataclass(frozen=True, kw_only=True)
class RewardTerm:
    """One weighted component of the reward: ``kind`` is a name of ``rlcore.rewards.REWARDS`` or ``module:function``.

    ``data``: datasets whose rollouts are scored; empty: all. ``stage``, for kind ``reward_model``: the stage that
    trains it. ``files``: data files that a custom function reads. ``python``: the interpreter that runs it, if it needs
    packages that cannot be installed next to rlcore. ``gate``: if the term is below it, the total reward is
    ``below_gate``, whatever the other terms are.
    """

    kind: str
    data: tuple[str, ...] = ()
    stage: str = ""
    weight: float = 1.0
    gate: float | None = None
    below_gate: float = 0.0
    options: Mapping[str, Scalar] = field(default_factory=dict)
    files: tuple[str, ...] = ()
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
    """Optimizer steps of one iteration.

    ``early_stop_kl``, ``early_stop_ref_kl``: end the update after an epoch whose mean KL (nats per token) to the
    sampling policy or to the reference policy exceeds the limit; 0: no limit.

    ``max_skipped_steps``: maximum number of consecutive steps that are skipped because of NaN or infinity in their loss
    or gradient. Their batch is saved. One more ends the run, as does any in the last iteration.
    """

    num_epochs: PositiveInt = 1
    num_minibatches: PositiveInt = 1
    tokens_per_microbatch: PositiveInt = 8192
    entropy_coefficient: NonNegativeFloat = 0.0
    early_stop_kl: NonNegativeFloat = 0.0
    early_stop_ref_kl: NonNegativeFloat = 0.0
    max_skipped_steps: NonNegativeInt = 2
    truncated_completions: Literal["score", "mask", "zero"] = "score"  # keep the reward, do not train, or reward 0
    optim: OptimConfig = field(default_factory=OptimConfig)
    rollout_correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpoint interval. A run also writes a checkpoint after its first and its last iteration.

    ``every_iterations`` > 0 replaces ``every_minutes``. No result depends on the number of checkpoints.
    """

    every_minutes: Duration = 15.0
    every_iterations: NonNegativeInt = 0


OBSERVERS = ("eval_every", "checkpoints")
"""Keys of :class:`RlConfig` that no weight depends on."""


@dataclass(frozen=True, kw_only=True)
class RlConfig:
    """One online-RL run. ``algorithm`` is a row of ``rlcore.algorithms.table.ALGORITHMS``."""

    algorithm: str
    num_iterations: PositiveInt
    prompts_per_iteration: PositiveInt
    group_size: PositiveInt
    learning_rate: PositiveFloat
    rewards: tuple[RewardTerm, ...] = ()  # empty: the KL to a teacher is the only reward
    sampling: SamplingConfig
    update: UpdateConfig = field(default_factory=UpdateConfig)
    kl: KlConfig = field(default_factory=KlConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    eval_every: NonNegativeInt = 0
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

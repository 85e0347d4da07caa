"""Settings of online reinforcement learning."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from rlcore.config.adapter import LoraConfig
from rlcore.config.bounds import Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Scalar
from rlcore.config.engine import EngineConfig
from rlcore.config.episodes import EpisodeConfig
from rlcore.config.training import OptimConfig
from rlcore.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How rollouts are drawn. No top-p, top-k or min-p: a filtered distribution biases the ratio."""

    temperature: PositiveFloat = 1.0
    max_new_tokens: PositiveInt
    max_concurrent: PositiveInt = 256  # sequences decoded at the same time
    dynamic_sampling_rounds: NonNegativeInt = 0  # rounds in which zero-signal groups are replaced; 0: off
    zero_signal_keep_prob: Fraction = 1.0  # of a prompt after n zero-signal groups in a row: to the power n
    staleness: NonNegativeInt = 0  # iterations that are sampled ahead of the update; rollouts are as many updates old
    episodes: EpisodeConfig = field(default_factory=EpisodeConfig)
    engine: EngineConfig | None = None  # left out: the run's engine

    def __post_init__(self) -> None:
        if self.episodes.has_tools and self.episodes.max_turn_tokens > self.max_new_tokens:
            raise ConfigError("episodes.max_turn_tokens must not be above max_new_tokens, which bounds all turns")
        if self.staleness and self.dynamic_sampling_rounds:
            raise ConfigError(
                f"dynamic_sampling_rounds looks at rewards before it samples on, staleness = {self.staleness} samples "
                f"before"
            )


@dataclass(frozen=True, kw_only=True)
class KlConfig:
    """KL to the reference policy. ``apply_to`` ``reward`` uses k1 per token; ``loss`` uses ``estimator``.

    ``target`` > 0 (nats per completion) turns on the adaptive controller, with ``horizon`` in completions. The plain
    estimators are there to reproduce papers; see :mod:`rlcore.algorithms.kl` for their gradients.
    """

    coefficient: NonNegativeFloat = 0.0
    apply_to: Literal["reward", "loss"] = "loss"
    estimator: Literal["k1_ratio", "k2", "k3_ratio", "k2_plain", "k3_plain"] = "k3_ratio"
    target: NonNegativeFloat = 0.0
    horizon: PositiveInt = 10_000

    def __post_init__(self) -> None:
        if self.target > 0.0 and self.coefficient == 0.0:
            raise ConfigError("target > 0 needs a coefficient > 0 to start from")


@dataclass(frozen=True, kw_only=True)
class GaeConfig:
    """Variants of generalised advantage estimation; the defaults are the plain form with one lambda.

    ``lam_value``: lambda of the critic's own returns; left out, that of the policy. ``lam_alpha`` > 0: the policy's
    lambda is ``1 - 1 / (lam_alpha * length)`` of each completion, in place of ``critic.lam`` (both VAPO, Yue et al.
    2025). ``bootstrap_truncated``: after a completion that was cut by length comes the critic's value of its last
    state, in place of 0.
    """

    lam_value: Fraction | None = None
    lam_alpha: NonNegativeFloat = 0.0
    bootstrap_truncated: bool = False


@dataclass(frozen=True, kw_only=True)
class CriticConfig:
    """The value model of PPO. Without ``optim`` it has the policy's settings (``update.optim``).

    ``init_from``: ``policy``, or the name of the stage whose reward model it starts from.

    ``architecture``: ``separate``, a backbone of its own; ``shared``, a head on the policy's backbone: one forward pass
    and one step of one optimizer for ``L_policy + coefficient * L_value``, and with ``detach`` the head's gradient ends
    before the backbone; ``lora``, an adapter of ``update.lora``'s shape beside the policy's on the same frozen base.
    ``learning_rate``: of the weights that the critic does not share with the policy.
    """

    init_from: str = "policy"
    architecture: Literal["separate", "shared", "lora"] = "separate"
    detach: bool = False
    coefficient: NonNegativeFloat = 0.5
    learning_rate: PositiveFloat = 1e-5
    clip_range: NonNegativeFloat = 0.2  # 0: no value clipping
    huber_delta: NonNegativeFloat = 0.0  # larger errors count linearly (Huber loss); 0: squared error for all
    gamma: Fraction = 1.0
    lam: Fraction = 0.95
    gae: GaeConfig = field(default_factory=GaeConfig)
    optim: OptimConfig | None = None
    warmup_iterations: NonNegativeInt = 0  # first iterations, in which only the critic learns

    def __post_init__(self) -> None:
        if self.architecture != "shared":
            return
        if self.init_from != "policy":
            raise ConfigError(
                "architecture = 'shared' starts from the policy, whose backbone it is on; it has no other"
            )
        if self.optim is not None:
            raise ConfigError(
                "architecture = 'shared' learns in the policy's optimizer: set update.optim, not critic.optim"
            )


@dataclass(frozen=True, kw_only=True)
class MismatchConfig:
    """Correction of the difference between the engine's and the trainer's log-probabilities.

    ``truncate`` cuts the weight at ``high``; ``mask`` gives weight 0 outside [``low``, ``high``]. The
    default of ``high`` is 2 to truncate, 5 to mask.
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
        """``high``, or the mode's own."""
        return self.high if self.high is not None else {"truncate": 2.0, "mask": 5.0, "off": math.inf}[self.mode]


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """Constants of the algorithm; left out: those of its row. One that the row does not have is refused.

    ``scale``: what a group's centred rewards are divided by, the std of the group, of the batch, or nothing.
    ``clip_low``, ``clip_high``: bounds of the ratio, or of the moved probability (dppo_tv). ``dual_clip``: bound of
    the ratio where the advantage is negative (usual 3), 0 = off. ``gate_…``: of sapo. ``constant_length`` in tokens.
    """

    scale: Literal["group", "group_sample", "batch", "batch_sample", "none"] | None = None
    clip_low: NonNegativeFloat | None = None
    clip_high: NonNegativeFloat | None = None
    dual_clip: NonNegativeFloat | None = None
    gate_positive: PositiveFloat | None = None
    gate_negative: PositiveFloat | None = None
    weighting: Literal["token_mean", "sequence_mean", "sequence_sum", "constant"] | None = None
    constant_length: PositiveInt | None = None  # for weighting = constant; left out: sampling.max_new_tokens

    def __post_init__(self) -> None:
        if self.dual_clip is not None and 0.0 < self.dual_clip <= 1.0:
            raise ConfigError("dual_clip must be above 1 (usual: 3), or 0 for off")


DEADLINE_MINUTES = 60.0


@dataclass(frozen=True, kw_only=True)
class RewardTerm:
    """One component of the reward: ``kind`` is a name of ``rlcore.rewards.REWARDS`` or ``module:function``.

    ``data``: the data sets whose rollouts it scores; none named: all. ``stage``, for kind ``reward_model``: the stage
    that trained it. ``files``, for a function of one's own: the data files that it reads. ``gate``: a rollout whose
    part is below it gets ``below_gate`` as its total reward, whatever the other parts are.
    """

    kind: str
    data: tuple[str, ...] = ()
    stage: str = ""
    weight: float = 1.0
    gate: float | None = None
    below_gate: float = 0.0
    options: Mapping[str, Scalar] = field(default_factory=dict)
    files: tuple[str, ...] = ()
    timeout_minutes: PositiveFloat = DEADLINE_MINUTES  # of one call of a function of one's own, with all its rollouts

    @property
    def module(self) -> str:
        """The module of a function of one's own; empty for a reward of the table."""
        return self.kind.partition(":")[0] if ":" in self.kind else ""

    def __post_init__(self) -> None:
        if self.files and not self.module:
            raise ConfigError(f"only a function of one's own (module:function) takes files, not kind {self.kind!r}")
        if self.timeout_minutes != DEADLINE_MINUTES and not self.module:
            raise ConfigError(f"only a function of one's own takes timeout_minutes, not kind {self.kind!r}")
        if self.gate is None and self.below_gate != 0.0:
            raise ConfigError("below_gate needs a gate")
        if self.stage and self.kind != "reward_model":
            raise ConfigError(f"only a reward of kind reward_model takes stage, not kind {self.kind!r}")


@dataclass(frozen=True, kw_only=True)
class UpdateConfig:
    """How one batch of rollouts is turned into optimizer steps.

    ``early_stop_kl``, ``early_stop_ref_kl``: the update ends after an epoch whose mean KL, in nats per token, to the
    policy that sampled or to the reference is above the limit; 0: no limit.

    ``max_skipped_steps``: so many steps in a row may meet NaN or infinity in their loss or gradient. They are not
    taken, and their batch is kept. One more ends the run, as does any in the last iteration.
    """

    num_epochs: PositiveInt = 1
    num_minibatches: PositiveInt = 1
    tokens_per_microbatch: PositiveInt = 8192
    entropy_coefficient: NonNegativeFloat = 0.0
    early_stop_kl: NonNegativeFloat = 0.0
    early_stop_ref_kl: NonNegativeFloat = 0.0
    max_skipped_steps: NonNegativeInt = 2
    truncated_completions: Literal["score", "mask", "zero"] = "score"  # its reward, not trained on, or 0
    optim: OptimConfig = field(default_factory=OptimConfig)
    rollout_correction: MismatchConfig = field(default_factory=MismatchConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When a run writes a checkpoint: after its first and its last iteration, and every ``every_minutes`` between them.

    ``every_iterations`` > 0: every so many iterations instead. No result depends on the number of checkpoints.
    """

    every_minutes: PositiveFloat = 15.0
    every_iterations: NonNegativeInt = 0


@dataclass(frozen=True, kw_only=True)
class RlConfig:
    """One online-RL run. ``algorithm`` is a row of ``rlcore.algorithms.table.ALGORITHMS``."""

    algorithm: str
    num_iterations: PositiveInt
    prompts_per_iteration: PositiveInt
    group_size: PositiveInt
    learning_rate: PositiveFloat
    rewards: tuple[RewardTerm, ...] = ()  # none: the KL to a teacher is all that is paid
    sampling: SamplingConfig
    update: UpdateConfig = field(default_factory=UpdateConfig)
    kl: KlConfig = field(default_factory=KlConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    eval_every: NonNegativeInt = 0
    checkpoints: CheckpointConfig = field(default_factory=CheckpointConfig)

    def __post_init__(self) -> None:
        if self.sampling.dynamic_sampling_rounds > 0 and self.group_size == 1:
            raise ConfigError(
                "sampling.dynamic_sampling_rounds needs group_size > 1: a group of one never carries a signal"
            )
        if self.sampling.zero_signal_keep_prob < 1.0 and self.group_size == 1:
            raise ConfigError(
                "sampling.zero_signal_keep_prob < 1 needs group_size > 1: a group of one never carries a signal"
            )
        if self.sampling.staleness and self.update.rollout_correction.mode == "off":
            raise ConfigError(
                "sampling.staleness > 0 needs update.rollout_correction: older weights sample than are trained"
            )
        if self.update.early_stop_ref_kl > 0.0 and self.kl.coefficient == 0.0:
            raise ConfigError("update.early_stop_ref_kl needs kl.coefficient > 0: without it there is no reference")
        if self.critic.gae.bootstrap_truncated and self.update.truncated_completions != "score":
            raise ConfigError(
                "critic.gae.bootstrap_truncated continues a cut completion with the critic's value, "
                f"update.truncated_completions = {self.update.truncated_completions!r} gives it no reward: choose one"
            )
        if self.critic.architecture == "lora" and self.update.lora.rank == 0:
            raise ConfigError("critic.architecture = 'lora' needs update.lora.rank > 0: a frozen base to be on")

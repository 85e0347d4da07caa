"""Sections of a preset about the whole run: evaluation, promotion, retraining, budget and tracking."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

from rlcore.config.rl import DEFAULT_TIMEOUT_MINUTES, RewardTerm, as_term
from rlcore.config.sampling import EngineConfig
from rlcore.errors import ConfigError
from rlcore.strict_config import (
    INLINE,
    Duration,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Scalar,
    above,
    at_least,
    below,
)

EXACT = ("math", "procedural", "code", "environment")
"""Verifiers that decide right or wrong, by comparing with the reference answer."""
NO_ACCURACY = (
    "evaluate on data with references (evaluation.data), name a verifier that needs none, such as a judge "
    "(evaluation.verifiers), or decide by a win rate (promotion.win_rate)"
)


@dataclass(frozen=True, kw_only=True)
class VerifierConfig:
    """Grader of held-out answers."""

    # `math`, `procedural`, `code` or `environment`, which need a reference answer; any other reward, such as `judge`;
    # `reward_model`; or `module:function`
    kind: str = "math"
    data: tuple[str, ...] = ()  # datasets that it grades; empty: all
    stage: str = ""  # for kind `reward_model`: the stage that trains it
    # options of the reward, or keyword arguments of the function
    options: Mapping[str, Scalar] = field(default_factory=dict)
    files: tuple[str, ...] = ()  # data files that a custom function reads
    python: str = ""  # interpreter of a custom function; empty: this one
    timeout_minutes: Duration = DEFAULT_TIMEOUT_MINUTES  # per call of a custom function, which grades all answers
    # lowest score of a correct answer; default: 0.99; of a reward model 0, the mean of its reference set
    correct_from: float | None = None

    def __post_init__(self) -> None:
        if self.is_exact and self.correct_from is not None:
            raise ConfigError(f"correct_from is not valid for kind {self.kind!r}, which decides right or wrong")
        self.term  # noqa: B018 - raises the errors of a reward term

    @property
    def is_exact(self) -> bool:
        """True if it decides right or wrong by a reference answer, which a prompt must have; else it gives a score."""
        return self.kind in EXACT

    @property
    def limit(self) -> float:
        """Score from which an answer is correct."""
        if self.correct_from is not None:
            return self.correct_from
        return 0.0 if self.kind == "reward_model" else 0.99

    @property
    def term(self) -> RewardTerm:
        """Verifier as the only term of a reward."""
        return as_term(self)


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Held-out evaluation: greedy, and ``num_samples`` sampled completions for pass@k."""

    num_problems: PositiveInt  # held-out problems per dataset; more: narrower intervals
    max_new_tokens: PositiveInt  # length limit of an answer
    data: tuple[str, ...] = ()  # evaluated datasets; empty: all that have prompts
    verifiers: tuple[VerifierConfig, ...] = (VerifierConfig(),)
    num_samples: NonNegativeInt = 0  # 0: greedy only
    num_sampled_problems: PositiveInt = 64  # problems per dataset for pass@k
    temperature: PositiveFloat = 1.0  # of the sampled completions
    num_monitor_problems: PositiveInt = 64  # of the periodic evaluation during an RL run (eval_every)
    confidence: Fraction = 0.95  # level of all intervals
    max_concurrent: PositiveInt = 256  # sequences decoded at the same time
    tokens_per_microbatch: PositiveInt = 8192  # of a reward model as verifier
    engine: EngineConfig | None = None  # default: the run's engine

    @property
    def terms(self) -> tuple[RewardTerm, ...]:
        """Verifiers as reward terms."""
        return tuple(each.term for each in self.verifiers)

    @property
    def reward_models(self) -> tuple[str, ...]:
        """Stages whose reward models verify."""
        return tuple(dict.fromkeys(each.stage for each in self.verifiers if each.kind == "reward_model"))

    def verifier_of(self, dataset: str) -> VerifierConfig:
        """Return the verifier of a dataset."""
        return next(each for each in self.verifiers if not each.data or dataset in each.data)

    def grades(self, dataset: str, *, has_reference: bool) -> bool:
        """Return True if an answer to a prompt of a dataset can be graded."""
        return has_reference or not self.verifier_of(dataset).is_exact

    def limits(self, datasets: Sequence[str]) -> dict[str, float]:
        """Return the score from which an answer is correct, of each dataset whose verifier gives scores."""
        found = {name: self.verifier_of(name) for name in datasets}
        return {name: each.limit for name, each in found.items() if not each.is_exact}


@dataclass(frozen=True, kw_only=True)
class OwnLimits:
    """Limits of the challenger itself. A first champion must meet only these."""

    min_accuracy: Fraction = 0.0  # least held-out accuracy
    max_truncated: Fraction = 1.0  # largest fraction of truncated answers
    max_ref_kl: NonNegativeFloat | None = None  # nats per token, last iteration; default: no limit


@dataclass(frozen=True, kw_only=True)
class PromotionConfig:
    """Promotion of the checkpoint ``challenger`` over the champion, both greedy on the same held-out prompts."""

    challenger: str  # the stage whose checkpoint may become champion
    # a stage of that kind: its judge, prompts and sampling compare challenger and champion, and the win rate decides
    # instead of accuracy, which remains a guard
    win_rate: str = ""
    # stages of that kind, each with a margin by which no metric may fall; both sides run their tasks
    benchmarks: Mapping[str, Fraction] = field(default_factory=dict)
    # largest probability of ever promoting a model that is no better, over all looks at one version of the prompts
    alpha: Annotated[float, above(0.0), below(0.5)] = 0.05
    min_gain: Fraction = 0.01  # smallest gain in accuracy for a promotion; with `win_rate`, above ½
    task_margin: Fraction = 0.05  # largest loss of accuracy within a task
    min_task_problems: PositiveInt = 100  # problems from which a task has a guard; safety tasks always have one
    safety_tasks: tuple[str, ...] = ()  # tasks that keep the stricter `safety_margin`
    safety_margin: Fraction = 0.02  # largest loss of accuracy on each safety task
    finished_margin: Fraction = 0.02  # largest loss of the fraction of finished answers
    length_margin: PositiveFloat = 32.0  # tokens by which answers may grow
    own: OwnLimits = field(default_factory=OwnLimits, metadata=INLINE)


@dataclass(frozen=True, kw_only=True)
class DriftConfig:
    """Distances from the last accepted data at which a column warns, and at which the new data are rejected."""

    warn_psi: NonNegativeFloat = 0.1  # population stability index, less its mean under chance
    refuse_psi: NonNegativeFloat = 0.25  # index at which new data are rejected
    warn_ks: Fraction = 0.1  # largest difference of cumulative fractions
    refuse_ks: Fraction = 0.25  # difference at which new data are rejected
    # a distance that chance exceeds with this probability or more, by a permutation test, is ignored
    false_alarm_rate: Annotated[float, at_least(0.0001), below(0.5)] = 0.001
    # digests of snapshots (12 digits or more, as on the page) that a person has checked and accepts
    accepted: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("psi", "ks"):
            if getattr(self, f"warn_{name}") > getattr(self, f"refuse_{name}"):
                raise ConfigError(f"warn_{name} exceeds refuse_{name}: it would never warn")
        short = [digest for digest in self.accepted if len(digest) < 12]
        if short:
            raise ConfigError(f"accepted names {short[0]!r}: give at least 12 digits of the snapshot's digest")


@dataclass(frozen=True, kw_only=True)
class RetrainConfig:
    """Conditions for training from the champion; the section ``promotion`` decides on the promotion itself.

    A new reward model is compared with the champion's on held-out pairs on which neither was trained.
    """

    drift: DriftConfig = field(default_factory=DriftConfig)
    min_accuracy: Fraction = 0.5  # least lower end of the interval of the new reward model's accuracy
    min_agreement: Fraction = 0.7  # least lower end of the interval of the agreement of both reward models
    # largest loss of accuracy against the champion's reward model, at the end of the interval
    accuracy_margin: Fraction = 0.05
    confidence: Annotated[float, above(0.0), below(1.0)] = 0.95  # level of these intervals


@dataclass(frozen=True, kw_only=True)
class BudgetConfig:
    """Limits of one run of the preset, from its first attempt until an attempt completes.

    They are compared before each stage and each RL iteration that is computed. A reached limit stops the run there, and
    the same command with a higher limit resumes it. No stage depends on them. ``tokens`` counts the completions of RL
    after each iteration, and those of evaluations, rejection and difficulty at the end of their stage.
    """

    hours: PositiveFloat | None = None  # wall-clock hours of all attempts; default: no limit
    cost: PositiveFloat | None = None  # hours times the price of this kind of machine in prices.toml; default: no limit
    judge_cost: PositiveFloat | None = None  # tokens of the judges of win rates times their prices; default: no limit
    tokens: PositiveInt | None = None  # sampled completion tokens; default: no limit


Tool = Literal["tensorboard", "wandb", "trackio"]


@dataclass(frozen=True, kw_only=True)
class TrackingConfig:
    """Tools that record the curves of each stage besides MLflow. No stage depends on them."""

    # `tensorboard` and `wandb` write into folders of these names in the state directory, `trackio` into its own; each
    # needs the extra of its name
    also: tuple[Tool, ...] = ()

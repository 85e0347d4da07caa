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
    """Grader of held-out answers. ``data``: the datasets that it grades; empty: all.

    ``kind``: one of ``math``, ``procedural``, ``code`` and ``environment``, which need a reference answer; any other
    reward, such as ``judge``; ``reward_model``, trained by the stage ``stage``; or a custom function
    ``module:function``, which reads ``files`` and runs in the interpreter ``python``. An answer is correct from the
    score ``correct_from``.
    """

    kind: str = "math"
    data: tuple[str, ...] = ()
    stage: str = ""
    options: Mapping[str, Scalar] = field(default_factory=dict)
    files: tuple[str, ...] = ()
    python: str = ""
    timeout_minutes: Duration = DEFAULT_TIMEOUT_MINUTES  # per call of a custom function, which grades all answers
    correct_from: float | None = None  # default: 0.99; of a reward model 0, the mean of its reference set

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
    """Held-out evaluation: greedy, and ``num_samples`` sampled completions for pass@k.

    ``data``: the evaluated datasets; empty: all that have prompts. Numbers of problems are per dataset.
    """

    num_problems: PositiveInt
    max_new_tokens: PositiveInt
    data: tuple[str, ...] = ()
    verifiers: tuple[VerifierConfig, ...] = (VerifierConfig(),)
    num_samples: NonNegativeInt = 0  # 0: greedy only
    num_sampled_problems: PositiveInt = 64
    temperature: PositiveFloat = 1.0
    num_monitor_problems: PositiveInt = 64  # of the periodic evaluation during an RL run (eval_every)
    confidence: Fraction = 0.95
    max_concurrent: PositiveInt = 256
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
    """Limits of the challenger itself: ``min_accuracy``, ``max_truncated`` and ``max_ref_kl``.

    A first champion must meet only these.
    """

    min_accuracy: Fraction = 0.0
    max_truncated: Fraction = 1.0
    max_ref_kl: NonNegativeFloat | None = None  # nats per token, last iteration; default: no limit


@dataclass(frozen=True, kw_only=True)
class PromotionConfig:
    """Promotion of the checkpoint ``challenger`` over the champion, both greedy on the same held-out prompts.

    ``alpha``: largest probability of ever promoting a model that is no better, over all looks at one version of the
    prompts. ``min_gain``: smallest gain in accuracy for a promotion. The margins are the largest allowed losses: of
    accuracy within a task, of accuracy on each of ``safety_tasks``, of the fraction of finished answers; and the tokens
    by which answers may grow. A task with fewer than ``min_task_problems`` problems has no guard, unless it is a safety
    task.

    ``win_rate``: a stage of that kind. Its judge, prompts and sampling then compare challenger and champion, whatever
    checkpoints it names itself. The win rate decides instead of accuracy, which remains a guard, and ``min_gain`` is
    the win rate above ½. ``benchmarks``: stages of that kind, each with a margin. Both sides run their tasks, and no
    metric may fall by the margin.
    """

    challenger: str
    win_rate: str = ""
    benchmarks: Mapping[str, Fraction] = field(default_factory=dict)
    alpha: Annotated[float, above(0.0), below(0.5)] = 0.05
    min_gain: Fraction = 0.01
    task_margin: Fraction = 0.05
    min_task_problems: PositiveInt = 100
    safety_tasks: tuple[str, ...] = ()
    safety_margin: Fraction = 0.02
    finished_margin: Fraction = 0.02
    length_margin: PositiveFloat = 32.0  # tokens
    own: OwnLimits = field(default_factory=OwnLimits, metadata=INLINE)


@dataclass(frozen=True, kw_only=True)
class DriftConfig:
    """Distances from the last accepted data at which a column warns, and at which the new data are rejected.

    ``psi``: population stability index, less its mean under chance; ``ks``: largest difference of cumulative fractions.
    A distance that chance alone exceeds with probability ``false_alarm_rate`` or more, by a permutation test, is
    ignored. ``accepted``: digests of snapshots (12 digits or more, as on the page) that a person has checked and
    accepts.
    """

    warn_psi: NonNegativeFloat = 0.1
    refuse_psi: NonNegativeFloat = 0.25
    warn_ks: Fraction = 0.1
    refuse_ks: Fraction = 0.25
    false_alarm_rate: Annotated[float, at_least(0.0001), below(0.5)] = 0.001
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

    A new reward model is compared with the champion's on held-out pairs on which neither was trained. The lower ends of
    the intervals of its accuracy and of their agreement must reach ``min_accuracy`` and ``min_agreement``. Its accuracy
    may be lower by at most ``accuracy_margin``, at the end of the interval.
    """

    drift: DriftConfig = field(default_factory=DriftConfig)
    min_accuracy: Fraction = 0.5
    min_agreement: Fraction = 0.7
    accuracy_margin: Fraction = 0.05
    confidence: Annotated[float, above(0.0), below(1.0)] = 0.95


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
    """Tools that record the curves of each stage besides MLflow. No stage depends on them.

    ``also``: ``tensorboard`` and ``wandb`` write into folders of these names in the state directory, ``trackio`` into
    its own. Each needs the extra of its name. A stage is a run of the preset's project.
    """

    also: tuple[Tool, ...] = ()

"""Settings of held-out evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rlcore.config.bounds import Duration, Fraction, NonNegativeInt, PositiveFloat, PositiveInt, Scalar
from rlcore.config.engine import EngineConfig
from rlcore.config.rl import DEFAULT_TIMEOUT_MINUTES, RewardTerm
from rlcore.errors import ConfigError

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
        return RewardTerm(
            kind=self.kind,
            data=self.data,
            stage=self.stage,
            options=self.options,
            files=self.files,
            python=self.python,
            timeout_minutes=self.timeout_minutes,
        )


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

"""Settings of held-out evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from rlcore.config.bounds import Fraction, NonNegativeInt, PositiveFloat, PositiveInt, Scalar
from rlcore.config.engine import EngineConfig
from rlcore.config.rl import RewardTerm


@dataclass(frozen=True, kw_only=True)
class VerifierConfig:
    """Grader of held-out answers: right or wrong. ``data``: the datasets that it grades; empty: all."""

    kind: Literal["math", "procedural", "code", "environment"] = "math"
    data: tuple[str, ...] = ()
    options: Mapping[str, Scalar] = field(default_factory=dict)

    @property
    def term(self) -> RewardTerm:
        """Verifier as the only term of a reward."""
        return RewardTerm(kind=self.kind, data=self.data, options=self.options)


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
    engine: EngineConfig | None = None  # default: the run's engine

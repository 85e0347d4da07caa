"""The parts of an RL run, which stay as they are, and its progress, which changes.

Every part is finished before the first iteration, and none is replaced after it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from rlcore.checks.audit.audit import Audit
from rlcore.checks.canaries import EngineCalibration
from rlcore.checks.health import HealthFinding, HealthMonitor, HealthReport
from rlcore.config import HealthConfig, RlConfig
from rlcore.loop.checkpoints import Checkpoints
from rlcore.loop.history import History
from rlcore.loop.prefetch import RolloutPrefetcher
from rlcore.loop.prompt_schedule import PromptSchedule
from rlcore.loop.recorder import HealthStop, Recorder
from rlcore.rewards.mix import WeightedReward
from rlcore.sampling.base import Sampler
from rlcore.text.tokenization import ChatTokenizer
from rlcore.training.learner_protocol import LearnerProtocol
from rlcore.types import Prompt

START: Mapping[str, Any] = MappingProxyType({"iteration": 0, "beside": {}, "turns": {}, "ahead": "", "audit": {}})
"""The state of a run before its first iteration."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOut:
    """Problems on which a run is evaluated every ``eval_every`` iterations, and never trained.

    ``verifier`` decides right or wrong, whatever the training reward adds. ``confidence``: that of the interval.
    """

    prompts: Sequence[Prompt]
    verifier: WeightedReward
    confidence: float = 0.95


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Components:
    """Everything that an iteration works with.

    ``learner`` has the policy, its reference, the critic and the configuration. ``engine`` takes the weights.
    ``sampler`` gives the rollouts: it is the engine itself, or plays episodes with tools on it. ``engine_dtype``: the
    precision in which the engine computes.

    ``shares``: the share of each data set among the prompts, as numbers above 0; left out if there is only one data
    set.

    ``folder``: where checkpoints are written, and where a killed run resumes. ``identity``: what a checkpoint there
    must have been made with.
    """

    seed: int
    learner: LearnerProtocol
    engine: Sampler
    sampler: Sampler
    engine_dtype: torch.dtype
    tokenizer: ChatTokenizer
    reward: WeightedReward
    prompts: Sequence[Prompt]
    folder: Path
    identity: Mapping[str, str]
    held_out: HeldOut | None = None
    health: HealthConfig = field(default_factory=HealthConfig)
    mixture_weights: Mapping[str, float] = field(default_factory=dict)

    @property
    def config(self) -> RlConfig:
        """The run's configuration, which the learner was made with."""
        return self.learner.config

    def prompt_schedule(self) -> PromptSchedule:
        """Which prompts come when, before the first iteration."""
        config = self.config
        return PromptSchedule(
            self.prompts,
            config.prompts_per_iteration,
            seed=self.seed,
            shares=self.mixture_weights,
            revisit=config.sampling.zero_signal_keep_prob,
        )


@dataclass(kw_only=True, slots=True, eq=False)
class Run:
    """The progress of a run: ``done`` iterations are over.

    ``baselines``: what each engine showed before any update. ``served``: the policy version that the engine was given
    last, or will be before it samples on. ``history``: the metrics of every iteration. ``judge``: the health rules,
    which have read it. ``findings`` of theirs, as they came up, each with its iteration.
    ``stop``: what ended the run early. ``settled``: the audit's state after the last iteration, as JSON; empty while
    the learner changes, and when a checkpoint has it. ``spared``: the checkpoints that the health rules may go back to.
    """

    components: Components
    recorder: Recorder
    checkpoints: Checkpoints
    prompt_schedule: PromptSchedule
    prefetcher: RolloutPrefetcher
    audit: Audit
    history: History
    health_monitor: HealthMonitor
    calibrations: tuple[EngineCalibration, ...]
    iterations_done: int = 0
    served_version: int = 0
    findings: list[dict[str, Any]] = field(default_factory=list)
    stop: HealthStop | None = None
    pending_audit_state: str = ""
    protected_steps: tuple[int, ...] = ()

    @property
    def is_over(self) -> bool:
        """Whether every iteration is done, or a health rule ended the run."""
        return self.stop is not None or self.iterations_done == self.components.config.num_iterations

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps beside the learner, as JSON values. The checkpoint itself keeps the iteration.

        Of the history it keeps a seal. The rows are on the disk when this returns.
        """
        return {
            "beside": self.history.seal(),
            "turns": self.prompt_schedule.state(),
            "ahead": self.prefetcher.state(),
            "audit": self.audit.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Resume from what :meth:`state` gave. The learner has been restored already."""
        self.iterations_done = int(state["iteration"])
        self.history.restore(state["beside"])
        self._judge_again()
        self.prompt_schedule.restore(state["turns"])
        self.prefetcher.restore(state["ahead"], self.iterations_done + 1, self.prompt_schedule.prompts_for)
        self.audit.restore(state["audit"])

    def _judge_again(self) -> None:
        """Find what the rules have found, row by row: a checkpoint that kept it would grow with the run."""
        self.health_monitor, self.findings = HealthMonitor(self.components.health), []
        rows: list[Mapping[str, float]] = []
        for row in self.history:
            rows.append(row)
            verdict = self.health_monitor.update(rows)
            self.findings += [to_record(each, int(row["iteration"])) for each in unreported(verdict, self.findings)]


def unreported(verdict: HealthReport, known: Sequence[Mapping[str, Any]]) -> list[HealthFinding]:
    """Those of a verdict that are not known yet."""
    return [each for each in verdict.findings if not any(_same(each, one) for one in known)]


def to_record(finding: HealthFinding, iteration: int) -> dict[str, Any]:
    """A finding as it is kept, with the iteration after which it came up."""
    return {"iteration": iteration, **asdict(finding)}


def _same(finding: HealthFinding, known: Mapping[str, Any]) -> bool:
    return all(known[name] == getattr(finding, name) for name in ("rule", "level", "since"))


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainResult:
    """What a run measured; the learner has the trained policy.

    ``history``: the metrics of each iteration up to the one whose weights the learner holds. ``dropped``: those of the
    iterations after it, if a health rule ended the run.
    """

    history: tuple[Mapping[str, float], ...]
    findings: tuple[Mapping[str, Any], ...]
    stop: HealthStop | None
    rolled_back_history: tuple[Mapping[str, float], ...]


@contextmanager
def timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Add the wall seconds of a block under its name."""
    started = time.perf_counter()
    yield
    seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - started

"""What an RL run is made of, which stays as it is, and how far the run is, which changes.

Every part is finished before the first iteration, and none of them is replaced after it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from rlcore.canaries import Baseline
from rlcore.config import HealthConfig, RlConfig
from rlcore.loop.ahead import RolloutsAhead
from rlcore.loop.checkpoints import Checkpoints
from rlcore.loop.draw import window, window_by_shares
from rlcore.loop.recorder import Recorder, Stop
from rlcore.models.lora import AdaptedModel
from rlcore.rewards.mix import MixedReward
from rlcore.sampling.base import Sampler
from rlcore.tokenization import ChatTokenizer
from rlcore.training.learner import Learner
from rlcore.types import Prompt


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOut:
    """Problems that a run is evaluated on every ``eval_every`` iterations, and never trained on.

    ``verifier`` decides right or wrong, whatever the training reward mixes in. ``confidence``: of the interval.
    """

    prompts: Sequence[Prompt]
    verifier: MixedReward
    confidence: float = 0.95


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Parts:
    """Everything that an iteration works with.

    ``learner`` holds the policy, the critic and the configuration. ``reference``: the frozen start that a KL penalty
    is measured to; None where there is no penalty. ``engine`` takes the weights; ``sampler`` is what rollouts are asked
    of: the engine itself, or one that plays episodes with tools on it. ``engine_dtype``: what the engine computes in.

    ``shares``: of each data set among the prompts, as numbers above 0; left out: they are of one.

    ``folder`` is where checkpoints are written, and where a run that was killed goes on from; ``identity`` is what a
    checkpoint there must have been made with. ``reward_models``: the models inside of ``reward``, to measure memory.
    """

    seed: int
    learner: Learner
    reference: PreTrainedModel | AdaptedModel | None
    engine: Sampler
    sampler: Sampler
    engine_dtype: torch.dtype
    tokenizer: ChatTokenizer
    reward: MixedReward
    prompts: Sequence[Prompt]
    folder: Path
    identity: Mapping[str, str]
    held_out: HeldOut | None = None
    health: HealthConfig = field(default_factory=HealthConfig)
    reward_models: tuple[torch.nn.Module, ...] = ()
    shares: Mapping[str, float] = field(default_factory=dict)

    @property
    def config(self) -> RlConfig:
        """The run's configuration, which the learner was made with."""
        return self.learner.config

    def prompts_of(self, iteration: int) -> list[Prompt]:
        """The prompts of one iteration (from 1): consecutive pieces of freshly shuffled epochs."""
        count = self.config.prompts_per_iteration
        start = (iteration - 1) * count
        if len(self.shares) > 1:
            return window_by_shares(self.prompts, self.shares, start, count, seed=self.seed)
        return window(self.prompts, start, count, seed=self.seed)


@dataclass(kw_only=True, slots=True, eq=False)
class Run:
    """``done`` iterations are over; ``history`` has the metrics of each, with its number under ``iteration``.

    ``baselines``: what each engine showed before any update. ``findings`` of the health rules, as they came up, each
    with its iteration. ``stop``: what ended the run early.
    """

    parts: Parts
    recorder: Recorder
    checkpoints: Checkpoints
    ahead: RolloutsAhead
    baselines: tuple[Baseline, ...]
    done: int = 0
    history: list[dict[str, float]] = field(default_factory=list)
    findings: list[dict[str, Any]] = field(default_factory=list)
    stop: Stop | None = None

    @property
    def is_over(self) -> bool:
        """Whether every iteration is done, or a health rule ended the run."""
        return self.stop is not None or self.done == self.parts.config.num_iterations

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps beside the learner, JSON-able; the iteration is kept by the checkpoint itself."""
        return {"history": self.history, "ahead": self.ahead.state(), "findings": self.findings}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state` gave; the learner has been restored already."""
        self.done = int(state["iteration"])
        self.history, self.findings = list(state["history"]), list(state["findings"])
        self.ahead.restore(state["ahead"], self.parts.prompts_of(self.done + 1))


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a run measured; the trained policy is the learner's.

    ``history``: the metrics of each iteration up to the one whose weights the learner holds. ``dropped``: of those
    after it, where a health rule ended the run.
    """

    history: tuple[Mapping[str, float], ...]
    findings: tuple[Mapping[str, Any], ...]
    stop: Stop | None
    dropped: tuple[Mapping[str, float], ...]


@contextmanager
def timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Wall seconds of a block, added under its name."""
    started = time.perf_counter()
    yield
    seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - started

"""The interface of rollout engines: sample groups of completions, take new weights, and be probed.

An engine holds a copy of the policy's weights under a version number. ``sampler_logprobs`` are those of the
distribution that was sampled from: ``log_softmax(logits / temperature)``, over the whole vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from rlcore.types import FailedRollout, Prompt, Rollout


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How completions are drawn. There is no top-p, top-k or min-p: a filtered distribution biases the ratio.

    ``greedy`` takes the likeliest token instead of a draw; ``temperature`` is then not used, and the log-probabilities
    are those at temperature 1.
    """

    temperature: float
    max_new_tokens: int
    num_samples: int
    greedy: bool = False


class Sampler(Protocol):
    """A rollout engine."""

    @property
    def policy_version(self) -> int:
        """Version of the weights that are being served."""
        ...

    def sample(
        self, prompts: Sequence[Prompt], params: SamplingParams, *, seed: int, places: Sequence[int] | None = None
    ) -> list[list[Rollout | FailedRollout]]:
        """One group of ``params.num_samples`` completions per prompt, in the order of the prompts.

        The draws of a completion are decided by ``seed``, the prompt's place and the sample's number, never by what
        else is computed at the same time. ``places``: the number of each prompt's place where it is not 0, 1, 2, …, so
        that a part of a batch can be sampled alone. The EOS token is the last of a completion that ended by itself.

        Raises:
            SamplingError: the engine is broken; a single completion that fails is a ``FailedRollout`` instead.
        """
        ...

    def load_weights(self, state: Mapping[str, torch.Tensor], *, policy_version: int) -> None:
        """Serve these weights from now on.

        Raises:
            SamplingError: other names or shapes than the engine's; it then serves what it served before.
        """
        ...

    def logprobs(self, prompt_ids: Sequence[int], completion_ids: Sequence[int], *, temperature: float) -> list[float]:
        """Natural log-probability of each completion token under the weights that are being served."""
        ...

    def differing_parts(self, state: Mapping[str, torch.Tensor]) -> list[str] | None:
        """The parts of the model whose weights are not these in the engine's precision, last bits included.

        None where the engine holds no weights that could be looked at.
        """
        ...


@runtime_checkable
class EngineGroup(Protocol):
    """An engine of several, each of which holds weights of its own."""

    @property
    def members(self) -> tuple[Sampler, ...]: ...


@runtime_checkable
class ReportsMetrics(Protocol):
    """An engine that counts what it does."""

    def take_metrics(self) -> dict[str, float]:
        """What it did since the last call, by the names of the glossary."""
        ...


@runtime_checkable
class Sleepable(Protocol):
    """An engine that shares the learner's GPU."""

    def rest(self) -> None:
        """Give the GPU to an update, until new weights come."""
        ...


def replicas_of(engine: Sampler) -> tuple[Sampler, ...]:
    """The engines behind one, each of which holds weights of its own."""
    return engine.members if isinstance(engine, EngineGroup) else (engine,)


def take_metrics(engine: Sampler) -> dict[str, float]:
    """How busy the servers behind an engine were since the last call; the built-in engine has nothing to say."""
    return engine.take_metrics() if isinstance(engine, ReportsMetrics) else {}


def sleep_engine(engine: Sampler) -> None:
    """Let an engine that shares the learner's GPU give it up until new weights come; others go on as they are."""
    if isinstance(engine, Sleepable):
        engine.rest()

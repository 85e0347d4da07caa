"""Interface of rollout engines: sample groups of completions, load weights, and return log-probabilities for checks.

An engine holds a copy of the policy's weights with a version number. ``sampler_logprobs`` belong to the distribution
that was sampled from: ``log_softmax(logits / temperature)`` over the whole vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from rlcore.types import FailedRollout, Prompt, Rollout


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """Sampling parameters. There is no top-p, top-k or min-p, because a filtered distribution biases the ratio.

    ``greedy`` takes the likeliest token; its log-probabilities are at temperature 1.
    """

    temperature: float
    max_new_tokens: int
    num_samples: int
    greedy: bool = False


class Sampler(Protocol):
    """Rollout engine."""

    @property
    def policy_version(self) -> int:
        """Version of the weights that the engine serves."""
        ...

    def sample(
        self, prompts: Sequence[Prompt], params: SamplingParams, *, seed: int, places: Sequence[int] | None = None
    ) -> list[list[Rollout | FailedRollout]]:
        """Return a group of ``params.num_samples`` completions per prompt, in prompt order.

        The random numbers of a completion depend on ``seed``, the prompt's index and the sample's index, not on the
        batch. A finished completion ends with EOS. ``places``: index of each prompt, if a part of a batch is sampled
        alone.

        Raises:
            SamplingError: The engine is broken. A single failed completion is a ``FailedRollout`` instead.
        """
        ...

    def load_weights(self, state: Mapping[str, torch.Tensor], *, policy_version: int) -> None:
        """Serve these weights from now on.

        Raises:
            SamplingError: Names or shapes differ from the engine's. It continues to serve the previous weights.
        """
        ...

    def logprobs(self, prompt_ids: Sequence[int], completion_ids: Sequence[int], *, temperature: float) -> list[float]:
        """Return the natural log-probability of each completion token under the served weights."""
        ...

    def differing_parts(self, state: Mapping[str, torch.Tensor]) -> list[str] | None:
        """Return the parts of the model whose weights differ from these in the engine's precision, in any bit.

        None if the engine's weights cannot be compared.
        """
        ...


def rejection_reason(prompt: Prompt, max_new_tokens: int, *, limit: int | None) -> str:
    """Return why an engine with ``limit`` positions cannot complete a prompt; empty if it can."""
    needed = len(prompt.token_ids) + max_new_tokens
    if not prompt.token_ids:
        return "the prompt has no tokens"
    is_long = limit is not None and needed > limit
    return f"prompt and completion need {needed} positions, the model has {limit}" if is_long else ""


def weight_mismatches(shapes: Mapping[str, tuple[int, ...]], state: Mapping[str, torch.Tensor]) -> list[str]:
    """Return why ``state`` does not have the weights of ``shapes``. Another name of one must have equal values."""
    missing = [f"{name} is missing" for name in shapes if name not in state]
    other = [
        f"{name} has a different shape" for name in shapes if name in state and tuple(state[name].shape) != shapes[name]
    ]
    extra = [
        f"{name} is unknown, or tied in the engine and different here"
        for name in state
        if name not in shapes and not any(_is_same(state[name], state[twin]) for twin in shapes if twin in state)
    ]
    return sorted(missing + other + extra)


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and (one.data_ptr() == other.data_ptr() or torch.equal(one, other))


def replicas_of(engine: Sampler) -> tuple[Sampler, ...]:
    """Return the engines behind an engine, each with its own weights."""
    members: tuple[Sampler, ...] = getattr(engine, "members", (engine,))
    return members


def take_metrics(engine: Sampler) -> dict[str, float]:
    """Return the server load since the last call. The built-in engine reports none."""
    return engine.take_metrics() if hasattr(engine, "take_metrics") else {}


def sleep_engine(engine: Sampler) -> None:
    """Release the GPU that an engine shares with the learner, until new weights are loaded."""
    for each in replicas_of(engine):
        if hasattr(each, "sleep"):
            each.sleep()

"""Sync canary: the engine serves the learner's weights, and computes what the learner computes.

Three checks, none of which replaces another:

1. the policy version that the engine reports, and that of each completion;
2. its weights, module by module, equal the learner's in the engine's precision, bit for bit. This finds a stale module
   after any step, except steps that vanish in rounding;
3. the log-probabilities that it reports at the run's temperature equal the learner's, up to rounding. This finds wrong
   computations with right weights. See ``agreement``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rlcore.algorithms.agreement import LogprobAgreement, Spread, agreement, check_agreement
from rlcore.errors import CanaryError, StaleSamplerError
from rlcore.sampling.base import Sampler, SamplingParams
from rlcore.seeding import generator
from rlcore.types import Prompt, Rollout

if TYPE_CHECKING:
    from jaxtyping import Float

NUM_PROBES = 8  # completions
# Per completion, as FIRST_TOKENS of an update; 256 tokens estimate the temperature to 0.3 % in bfloat16.
PROBE_TOKENS = 32


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ExpectedWeights:
    """Weights and scores that an engine must agree with.

    Attributes:
        state: The learner's weights, of ``policy_version``.
        score: Return the learner's log-probability and entropy (nats, [T] each) of all tokens of N completions.
        temperature: Sampling temperature.
        dtype: The lower precision of engine and learner.
    """

    state: Mapping[str, torch.Tensor]
    policy_version: int
    score: Callable[[Sequence[Rollout]], tuple[torch.Tensor, torch.Tensor]]
    temperature: float
    dtype: torch.dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineCalibration:
    """Measurement of a working engine before any update.

    Attributes:
        noise: Differences to the learner by rounding.
        unverified: Modules whose weights the engine stores in a form that cannot be compared.
    """

    noise: Spread
    unverified: frozenset[str]


def sample_probes(
    engine: Sampler, prompts: Sequence[Prompt], params: SamplingParams, *, seed: int, group_size: int = 1
) -> list[Rollout]:
    """Sample ``NUM_PROBES`` completions, ``group_size`` of each of the first prompts; groups cost fewer prompt tokens.

    Raises:
        CanaryError: The engine completes none of them.
    """
    short = SamplingParams(
        temperature=params.temperature, max_new_tokens=min(params.max_new_tokens, PROBE_TOKENS), num_samples=group_size
    )
    made = [item for group in engine.sample(prompts[: NUM_PROBES // group_size], short, seed=seed) for item in group]
    probes = [item for item in made if isinstance(item, Rollout)]
    if not probes:
        reason = "; ".join(sorted({item.reason for item in made if not isinstance(item, Rollout)}))
        raise CanaryError(f"the engine completes none of {len(made)} probes: {reason}")
    return probes


def calibrate_engine(engine: Sampler, probes: Sequence[Rollout], expected: ExpectedWeights) -> EngineCalibration:
    """Measure an engine before any update, when differences to the learner are only rounding; as ``sync_canary``."""
    found = _compare(engine, probes, expected)
    check_agreement(found, noise=None, dtype=expected.dtype)
    unverified = frozenset(engine.differing_parts(expected.state) or ())
    return EngineCalibration(noise=Spread(found.mean_odds, found.high_odds), unverified=unverified)


def sync_canary(
    engine: Sampler, probes: Sequence[Rollout], expected: ExpectedWeights, calibration: EngineCalibration
) -> dict[str, float]:
    """Check version, weights and log-probabilities after a sync, and return metrics ``sync/...``.

    Raises:
        StaleSamplerError: Another policy version, or other weights than the learner's.
        CanaryError: Log-probabilities that rounding does not explain, or another temperature.
    """
    weights_canary(engine, expected.state, calibration, policy_version=expected.policy_version)
    found = _compare(engine, probes, expected)
    check_agreement(found, noise=calibration.noise, dtype=expected.dtype)
    return _metrics(found, calibration)


def rollouts_canary(
    first_tokens: Float[torch.Tensor, "tokens 4"],
    calibrations: Sequence[EngineCalibration],
    *,
    temperature: float,
    dtype: torch.dtype,
    seed: int,
) -> list[dict[str, float]]:
    """Check the log-probabilities of rollouts that engines sampled with the learner's weights before its update.

    ``first_tokens`` as in :class:`~rlcore.training.update_stats.UpdateStats`. Of each engine as many random tokens are
    compared as probes have, so that errors and false alarms are as likely. Return metrics of each engine with a token.
    """
    metrics = []
    for replica, calibration in enumerate(calibrations):
        own = first_tokens[first_tokens[:, 0] == replica, 1:]
        order = torch.randperm(len(own), generator=generator(seed, replica))
        if len(own):
            found = agreement(*own[order[: NUM_PROBES * PROBE_TOKENS]].unbind(1), temperature=temperature)
            check_agreement(found, noise=calibration.noise, dtype=dtype)
            metrics.append(_metrics(found, calibration))
    return metrics


def _metrics(found: LogprobAgreement, calibration: EngineCalibration) -> dict[str, float]:
    return {
        "sync/logprob_max_diff": found.max_abs,
        "sync/log_odds_mean_diff": found.mean_odds,
        "sync/temperature_ratio": found.temperature,
        "sync/unverified_modules": float(len(calibration.unverified)),
    }


def weights_canary(
    engine: Sampler, state: Mapping[str, torch.Tensor], calibration: EngineCalibration, *, policy_version: int
) -> None:
    """Check only version and weights.

    Raises:
        StaleSamplerError: Another policy version, or other weights than ``state``.
    """
    require_version(policy_version, [engine.policy_version])
    differing = set(engine.differing_parts(state) or ()) - calibration.unverified
    if differing:
        raise StaleSamplerError(
            f"the engine's weights are not the learner's in {len(differing)} modules: "
            f"{', '.join(sorted(differing)[:8])}",
            where=f"policy version {policy_version}",
            fix="the new weights did not arrive completely; see the engine's log",
        )


def _compare(engine: Sampler, probes: Sequence[Rollout], expected: ExpectedWeights) -> LogprobAgreement:
    require_version(expected.policy_version, [engine.policy_version, *(probe.policy_version for probe in probes)])
    reported = torch.tensor([value for probe in probes for value in probe.sampler_logprobs])
    return agreement(reported, *expected.score(probes), temperature=expected.temperature)


def require_version(policy_version: int, served: Iterable[int]) -> None:
    """Check the versions that an engine and its completions report."""
    others = set(served) - {policy_version}
    if others:
        raise StaleSamplerError(
            f"the engine serves policy version {min(others)}, the learner has {policy_version}",
            fix="the weights were not loaded; see the engine's log",
        )

"""Sends the learner's weights to the engine, and compares both: before the first update and after each sync."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from rlcore.checks.canaries import (
    EngineCalibration,
    ExpectedWeights,
    calibrate_engine,
    sample_probes,
    sync_canary,
    weights_canary,
)
from rlcore.loop.run import Components, Run
from rlcore.sampling.base import Sampler, SamplingParams, replicas_of
from rlcore.seeding import derive_seed
from rlcore.types import Rollout


def calibrate_engines(parts: Components) -> tuple[list[EngineCalibration], list[Rollout]]:
    """Measure each engine while all of them hold the learner's first weights: so looks a sound one.

    Returns:
        A baseline for each engine, and the completions that they sampled for the comparison.

    Raises:
        StaleSamplerError, CanaryError: an engine serves other weights than the learner's, or computes differently.
    """
    truth, baselines, samples = _truth(parts), list[EngineCalibration](), list[Rollout]()
    for engine in replicas_of(parts.engine):  # each holds weights of its own
        probes = _probes(parts, engine)
        baselines.append(calibrate_engine(engine, probes, truth))
        samples += probes
    return baselines, samples


def calibration_messages(baselines: Sequence[EngineCalibration]) -> list[str]:
    """Sentences on what the comparison before any update showed."""
    loudest = max(baseline.noise.mean for baseline in baselines)
    notes = [f"weight sync verified mean_log_odds_diff={loudest:.2g}"]
    if hidden := sorted(set().union(*(baseline.unverified for baseline in baselines))):
        notes.append(f"the engine hides its weights in {', '.join(hidden)}: log-probabilities alone prove a sync there")
    return notes


def sync_weights(parts: Components, baselines: Sequence[EngineCalibration]) -> dict[str, float]:
    """Push the learner's weights to the engine, then prove that it serves them.

    Returns:
        The figures ``sync/...``; of several engines the largest.

    Raises:
        SamplingError: the engine refuses the weights.
        StaleSamplerError, CanaryError: it serves other weights than the learner's, or computes differently.
    """
    learner = parts.learner
    parts.engine.load_weights(_state(parts), policy_version=learner.policy_version)
    truth = _truth(parts)
    figures = [
        sync_canary(engine, _probes(parts, engine), truth, baseline)
        for engine, baseline in zip(replicas_of(parts.engine), baselines, strict=True)
    ]
    return {name: max(each[name] for each in figures) for name in figures[0]}


def sync_when_idle(run: Run) -> dict[str, float]:
    """:func:`sync_weights` of a run whose engine is idle."""
    found = sync_weights(run.components, run.calibrations)
    run.served_version = run.components.learner.policy_version
    return found


def prepare_weight_load(run: Run) -> Callable[[], None] | None:
    """What gives the engine the learner's weights of now, between two batches; None where it has them.

    It works on a copy: the learner has others by then. The canary asks for version and weights alone.
    """
    parts, version = run.components, run.components.learner.policy_version
    if run.served_version == version:
        return None
    state, run.served_version = _state(parts), version

    def load() -> None:
        parts.engine.load_weights(state, policy_version=version)
        for engine, baseline in zip(replicas_of(parts.engine), run.calibrations, strict=True):
            weights_canary(engine, state, baseline, policy_version=version)

    return load


def _state(parts: Components) -> Mapping[str, torch.Tensor]:
    """The learner's weights; a copy in a run whose engine takes some that the learner has no more."""
    return parts.learner.snapshot() if parts.config.sampling.staleness > 1 else parts.learner.weights()


def _truth(parts: Components) -> ExpectedWeights:
    learner = parts.learner
    return ExpectedWeights(
        state=learner.weights(),
        policy_version=learner.policy_version,
        score=learner.scores,
        temperature=parts.config.sampling.temperature,
        dtype=lower_precision(parts.engine_dtype, learner.facts.compute_dtype),
    )


def lower_precision(engine: torch.dtype, learner: torch.dtype) -> torch.dtype:
    """The coarser precision of the two: it bounds how well they can agree."""
    return max(engine, learner, key=lambda dtype: torch.finfo(dtype).eps)


def _probes(parts: Components, engine: Sampler) -> list[Rollout]:
    """Completions that the engine samples now. Only the weights and the run's seed decide which."""
    sampling = parts.config.sampling
    params = SamplingParams(temperature=sampling.temperature, max_new_tokens=sampling.max_new_tokens, num_samples=1)
    seed = derive_seed(parts.seed, "probes", parts.learner.policy_version)
    return sample_probes(engine, parts.prompts, params, seed=seed)

"""Weight sync: send the learner's weights to the engine, and verify them at the start and after each sync."""

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
from rlcore.loop.components import Components
from rlcore.loop.run import Run
from rlcore.sampling.base import Sampler, SamplingParams, replicas_of
from rlcore.seeding import derive_seed
from rlcore.types import Rollout


def calibrate_engines(components: Components) -> tuple[list[EngineCalibration], list[Rollout]]:
    """Measure each engine while all of them hold the learner's first weights.

    Returns:
        A calibration per engine, and the completions that they sampled for the comparison.

    Raises:
        StaleSamplerError, CanaryError: An engine serves other weights than the learner's, or computes differently.
    """
    expected, calibrations, samples = _expected_weights(components), list[EngineCalibration](), list[Rollout]()
    for engine in replicas_of(components.engine):  # each holds its own weights
        probes = _probes(components, engine)
        calibrations.append(calibrate_engine(engine, probes, expected))
        samples += probes
    return calibrations, samples


def calibration_messages(calibrations: Sequence[EngineCalibration]) -> list[str]:
    """Return log messages on the comparison before the first update."""
    largest = max(calibration.noise.mean for calibration in calibrations)
    messages = [f"weight sync verified mean_log_odds_diff={largest:.2g}"]
    if unverified := sorted(set().union(*(calibration.unverified for calibration in calibrations))):
        messages.append(f"weights cannot be compared in {', '.join(unverified)}: only log-probabilities verify a sync")
    return messages


def sync_weights(components: Components, calibrations: Sequence[EngineCalibration]) -> dict[str, float]:
    """Send the learner's weights to the engine, then verify that it serves them.

    Returns:
        Metrics ``sync/...``, the maximum over all engines.

    Raises:
        SamplingError: The engine rejects the weights.
        StaleSamplerError, CanaryError: It serves other weights than the learner's, or computes differently.
    """
    learner = components.learner
    components.engine.load_weights(_state(components), policy_version=learner.policy_version)
    expected = _expected_weights(components)
    metrics = [
        sync_canary(engine, _probes(components, engine), expected, calibration)
        for engine, calibration in zip(replicas_of(components.engine), calibrations, strict=True)
    ]
    return {name: max(each[name] for each in metrics) for name in metrics[0]}


def sync_when_idle(run: Run) -> dict[str, float]:
    """Sync the weights of a run whose engine is idle."""
    metrics = sync_weights(run.components, run.calibrations)
    run.served_version = run.components.learner.policy_version
    return metrics


def prepare_weight_load(run: Run) -> Callable[[], None] | None:
    """Return a function that loads the current weights between two batches, or None if the engine has them.

    It loads a copy, because the learner continues to train. The canary checks only version and weights.
    """
    components, version = run.components, run.components.learner.policy_version
    if run.served_version == version:
        return None
    state, run.served_version = _state(components), version

    def load() -> None:
        components.engine.load_weights(state, policy_version=version)
        for engine, calibration in zip(replicas_of(components.engine), run.calibrations, strict=True):
            weights_canary(engine, state, calibration, policy_version=version)

    return load


def _state(components: Components) -> Mapping[str, torch.Tensor]:
    """Return the learner's weights; a copy if the engine may load them after later updates."""
    return (
        components.learner.copy_weights() if components.config.sampling.staleness > 1 else components.learner.weights()
    )


def _expected_weights(components: Components) -> ExpectedWeights:
    learner = components.learner
    return ExpectedWeights(
        state=learner.weights(),
        policy_version=learner.policy_version,
        score=learner.scores,
        temperature=components.config.sampling.temperature,
        dtype=lower_precision(components.engine_dtype, learner.facts.compute_dtype),
    )


def lower_precision(engine: torch.dtype, learner: torch.dtype) -> torch.dtype:
    """Return the lower of both precisions, which limits their agreement."""
    return max(engine, learner, key=lambda dtype: torch.finfo(dtype).eps)


def _probes(components: Components, engine: Sampler) -> list[Rollout]:
    """Sample completions from the engine. They depend only on the weights and the seed of the run."""
    sampling = components.config.sampling
    params = SamplingParams(temperature=sampling.temperature, max_new_tokens=sampling.max_new_tokens, num_samples=1)
    seed = derive_seed(components.seed, "probes", components.learner.policy_version)
    return sample_probes(engine, components.prompts, params, seed=seed)
